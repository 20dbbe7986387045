"""What `kvplug train-gate` and `kvplug import-gate` do: from a model and texts, or a published file, to a gate file."""

from __future__ import annotations

import argparse
import datetime
import hashlib
import shutil
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from vllm_kvplug.calibrate.command import local_folder, read_texts, versions
from vllm_kvplug.calibrate.profile import ProfiledModel, kv_shape, weights_hash
from vllm_kvplug.config import explain
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.gates.backbone import Backbone, cut_texts
from vllm_kvplug.gates.files import Gate, GateMetadata, SinkGateShape, TextFile, WriteGateShape, save_gate
from vllm_kvplug.gates.released import import_sink_gate, import_write_gate
from vllm_kvplug.gates.targets import Frame
from vllm_kvplug.gates.train_sink import HELD_OUT, SinkTraining, train_sink_gate
from vllm_kvplug.gates.train_write import WriteTraining, evaluate, train_write_gate
from vllm_kvplug.gates.training import Checkpoint, History, plot_history
from vllm_kvplug.gates.write_gate import WriteGate
from vllm_kvplug.spread import Ranks, spread

Trained = tuple[Gate, GateMetadata, History]


def train(args: argparse.Namespace) -> None:
    """Train the gate of `args.kind`, or go on with it, and write it with its curves."""
    kind: type[WriteTraining] | type[SinkTraining] = WriteTraining if args.kind == "wgkv" else SinkTraining
    given = {name: getattr(args, name) for name in kind.model_fields if getattr(args, name) is not None}
    if args.ray is not None and args.device:
        raise PolicyError("train-gate: with --ray every task gets a device from Ray: remove --device")
    if args.ray is not None and args.kind == "wgkv" and given.get("batch", 1) == 1:
        raise PolicyError("train-gate: --ray spreads the sequences of a step, which has one: give --batch")
    try:
        settings = kind(**given)
        texts = read_texts(args.texts)
    except ValidationError as error:
        raise PolicyError(f"train-gate: {explain(error)}") from None
    except (OSError, ValueError) as error:
        raise PolicyError(f"train-gate: {error}") from None
    out = args.out or Path("profiles") / f"{Path(args.model).name}-{args.kind}.safetensors"
    run = _Run(args, out.with_suffix(".training"))
    torch.manual_seed(settings.seed)
    if isinstance(settings, WriteTraining):
        gate, metadata, history = run.write_gate(texts, settings)
    else:
        gate, metadata, history = run.sink_gate(texts, settings)
    save_gate(out, gate, metadata, args.int8)
    picture = out.with_suffix(".png")
    drawn = plot_history(history, picture, f"{args.kind} gate of {metadata.model.name}")
    shutil.rmtree(run.progress)
    report(metadata, out, picture if drawn else None)


class _Run:
    """A model that gates are trained beside, and `progress`, the folder that exists until a gate is written."""

    def __init__(self, args: argparse.Namespace, progress: Path):
        self.args, self.progress = args, progress
        self.workers = spread(args.ray)
        folder = local_folder(args.model)
        self.backbone = Backbone(folder, args.device or self.workers.device)
        self.config = self.backbone.config
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def write_gate(self, texts: list[tuple[str, str]], settings: WriteTraining) -> Trained:
        # A sequence inside the window would teach nothing: there, gates do not matter.
        sequences = cut_texts(self.tokenizer, texts, settings.length, settings.window + 1, self.args.tokens)
        held = min(len(sequences) // 20, 50)  # of the last ones
        training, testing = sequences[: len(sequences) - held], sequences[len(sequences) - held :]
        shape = WriteGateShape(
            hidden=settings.hidden or 4 * kv_shape(self.config)[3],
            window=settings.window,
            tau=settings.tau,
            sparsity_weight=settings.sparsity_weight,
        )
        metadata = self.metadata(shape, settings, sum(map(len, training)))
        job = (self.backbone, metadata.empty_gate(), training, testing, settings, self.checkpoint("gate", metadata))
        most = min(settings.batch, len(training))
        gate, history, results = self.workers.together(_train_write_gate, most, *job)
        return gate, metadata.model_copy(update={"results": results}), history

    def sink_gate(self, texts: list[tuple[str, str]], settings: SinkTraining) -> Trained:
        limits = (settings.length, HELD_OUT, settings.tokens)
        contexts = cut_texts(self.tokenizer, texts, *limits, special_tokens=False)
        frame = Frame.of(self.tokenizer)
        self.check_length(contexts, frame, settings.chunk)
        shape = SinkGateShape(hidden_size=self.config.hidden_size, dim=settings.dim, sinks=settings.sinks)
        metadata = self.metadata(shape, settings, sum(map(len, contexts)))
        gate: Any = metadata.empty_gate()
        checkpoint, memory = self.checkpoint("", metadata), self.args.memory_gib * 2**30
        job = (gate, contexts, frame, settings, checkpoint, memory)
        history, results = train_sink_gate(self.backbone, *job, self.workers)
        return gate, metadata.model_copy(update={"results": results}), history

    def check_length(self, contexts: list[Tensor], frame: Frame, chunk: int) -> None:
        limit = self.config.max_position_embeddings
        for context in contexts:
            longest = max(len(repetition) for _, _, repetition in frame.repetitions(context, chunk))
            needed = len(frame.before) + len(context) + longest
            if needed > limit:
                raise PolicyError(
                    f"train-gate: a context of {len(context)} tokens and its repetition need {needed} positions, the "
                    f"model has {limit}: lower --length to {limit - needed + len(context)}"
                )

    def checkpoint(self, name: str, metadata: GateMetadata) -> Checkpoint:
        return Checkpoint(self.progress / name, metadata.model_dump_json(exclude={"date", "versions"}))

    def metadata(
        self, shape: WriteGateShape | SinkGateShape, settings: WriteTraining | SinkTraining, tokens: int
    ) -> GateMetadata:
        files = [
            TextFile(name=file.name, sha256=hashlib.sha256(file.read_bytes()).hexdigest()) for file in self.args.texts
        ]
        return GateMetadata(
            model=ProfiledModel.of(self.config, self.backbone.folder.name),
            gate=shape,
            source="kvplug train-gate",
            date=datetime.date.today().isoformat(),
            weights_hash=weights_hash(self.backbone.folder),
            training=settings.model_dump(exclude_none=True),
            files=tuple(files),
            tokens=tokens,
            versions=versions(str(self.backbone.dtype).removeprefix("torch.")),
        )


def _train_write_gate(
    ranks: Ranks,
    backbone: Backbone,
    gate: WriteGate,
    training: list[Tensor],
    testing: list[Tensor],
    settings: WriteTraining,
    checkpoint: Checkpoint,
) -> tuple[WriteGate, History, dict[str, float]]:
    """The trained gate on the CPU, its losses and, of the first rank, its results on the sequences for testing."""
    gate = gate.to(backbone.device)
    history = train_write_gate(backbone.model, gate, training, settings, checkpoint, ranks)
    results = evaluate(backbone.model, gate, testing, settings) if testing and ranks.rank == 0 else {}
    return gate.cpu(), history, results


def import_gate(args: argparse.Namespace) -> None:
    """Convert a published gate."""
    if args.double_bias and args.kind == "wgkv":
        raise PolicyError("import-gate: --double-bias is for fastkvzip, a write gate has no such bias")
    config, name = AutoConfig.from_pretrained(args.model), Path(args.model).name
    gate: Gate
    if args.kind == "wgkv":
        gate, metadata = import_write_gate(args.file, config, name)
    else:
        gate, metadata = import_sink_gate(args.file, config, name, args.double_bias)
    save_gate(args.out, gate, metadata, args.int8)
    report(metadata, args.out, None)


def report(metadata: GateMetadata, out: Path, picture: Path | None) -> None:
    table = Table(title=f"{metadata.kind} gate of {metadata.model.name}", show_header=False)
    for name, value in {**metadata.gate.model_dump(), **metadata.results}.items():
        if isinstance(value, list):
            value = " ".join(f"{entry:.2f}" for entry in value)
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    console = Console()
    console.print(table)
    console.print(f"written to {out}" + (f", curves to {picture}" if picture else ""), highlight=False, soft_wrap=True)
