"""`kvplug train-gate` and `kvplug import-gate`: make the gate file that a policy loads."""

from __future__ import annotations

import argparse
import datetime
import hashlib
import shutil
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vllm_kvplug.config import explain
from vllm_kvplug.errors import PolicyError


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    for kind, what in (("wgkv", "write gate of WG-KV"), ("fastkvzip", "gate of Fast KVzip")):
        usage = f"kvplug train-gate {kind} MODEL --texts FILE [FILE ...] [options]"
        one = kinds.add_parser(kind, help=what, usage=usage)
        one.set_defaults(kind=kind)
        _add_common(one)
        (_add_write if kind == "wgkv" else _add_sink)(one)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="model folder or Hugging Face id")
    parser.add_argument(
        "--texts",
        metavar="FILE",
        type=Path,
        nargs="+",
        required=True,
        help="plain text files, or .jsonl with a 'text' field a line",
    )
    parser.add_argument("--out", type=Path, help="gate to write (default profiles/<model>-<kind>.safetensors)")
    parser.add_argument("--int8", action="store_true", help="store matrices in 8 bits instead of bfloat16")
    parser.add_argument("--device", help="default: cuda if there is one")
    parser.add_argument("--seed", type=int, help="default 0")
    # What is not given here keeps the default of the training's settings.
    parser.add_argument("--length", type=int, help="most tokens of a sequence (wgkv: 4096, fastkvzip: 30000)")
    parser.add_argument("--steps", type=int, help="default: one pass over the texts (wgkv), 5000 (fastkvzip)")
    parser.add_argument("--learning-rate", type=float, help="default 1e-3 (wgkv), 0.2 (fastkvzip)")


def _add_write(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, help="tokens of texts to use (default all)")
    parser.add_argument(
        "--lambda", dest="sparsity_weight", type=float, metavar="X", help="higher admits less (default 0.04)"
    )
    parser.add_argument("--window", type=int, help="local window W (default 256)")
    parser.add_argument("--hidden", type=int, help="hidden units a head (default 4 times the head dim)")
    parser.add_argument("--tau", type=float, help="admission threshold (default 0.1)")
    parser.add_argument(
        "--sparsity", choices=["remaining", "paper"], help="form of the sparsity loss: released (default) or printed"
    )


def _add_sink(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, help="tokens of texts to use (default 1000000)")
    parser.add_argument("--chunk", type=int, help="tokens that are repeated at a time (default 2000)")
    parser.add_argument("--dim", type=int, help="size of the gate's queries and keys, D' (default 16)")
    parser.add_argument("--sinks", type=int, help="sink keys a head, S (default 16)")
    parser.add_argument("--batch", type=int, help="tokens a step (default 1000)")
    parser.add_argument(
        "--memory-gib", type=float, default=16.0, help="for hidden states of layers at a time (default %(default)s)"
    )


def train(args: argparse.Namespace) -> None:
    from vllm_kvplug.calibrate.command import read_texts
    from vllm_kvplug.gates.train_sink import SinkTraining
    from vllm_kvplug.gates.train_write import WriteTraining

    kind: type[WriteTraining] | type[SinkTraining] = WriteTraining if args.kind == "wgkv" else SinkTraining
    given = {name: getattr(args, name) for name in kind.model_fields if getattr(args, name) is not None}
    try:
        settings = kind(**given)
        texts = read_texts(args.texts)
    except ValidationError as error:
        raise PolicyError(f"train-gate: {explain(error)}") from None
    except (OSError, ValueError) as error:
        raise PolicyError(f"train-gate: {error}") from None
    out = args.out or Path("profiles") / f"{Path(args.model).name}-{args.kind}.safetensors"
    _Training(args, out, texts).run(settings)


class _Training:
    """One run: what is the same for both kinds of gate."""

    def __init__(self, args: argparse.Namespace, out: Path, texts: list[tuple[str, str]]):
        import torch
        from transformers import AutoTokenizer

        from vllm_kvplug.calibrate.command import local_folder
        from vllm_kvplug.gates.backbone import load_backbone

        self.args, self.out, self.texts = args, out, texts
        self.folder = local_folder(args.model)
        self.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.model = load_backbone(self.folder, self.device)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(self.folder)
        self.progress = out.with_suffix(".training")  # a folder, gone when the gate is written

    def run(self, settings: Any) -> None:
        import torch

        from vllm_kvplug.gates.files import save_gate
        from vllm_kvplug.gates.training import plot_history

        torch.manual_seed(settings.seed)
        fit = self._write if self.args.kind == "wgkv" else self._sink
        gate, metadata, history = fit(settings)
        save_gate(self.out, gate, metadata, self.args.int8)
        picture = self.out.with_suffix(".png")
        drawn = plot_history(history, picture, f"{self.args.kind} gate of {metadata.model.name}")
        shutil.rmtree(self.progress)
        report(metadata, self.out, picture if drawn else None)

    def _write(self, settings: Any) -> tuple[Any, Any, Any]:
        from vllm_kvplug.calibrate.profile import kv_shape
        from vllm_kvplug.gates.backbone import cut_texts
        from vllm_kvplug.gates.files import WriteGateShape
        from vllm_kvplug.gates.train_write import evaluate, train_write_gate

        # A sequence inside the window would teach nothing: there, gates do not matter.
        shortest = settings.window + 1
        sequences = cut_texts(self.tokenizer, self.texts, settings.length, shortest, self.args.tokens)
        held = min(len(sequences) // 20, 50)  # of the last ones
        training, testing = sequences[: len(sequences) - held], sequences[len(sequences) - held :]
        hidden = settings.hidden or 4 * kv_shape(self.model.config)[3]
        shape = WriteGateShape(
            hidden=hidden, window=settings.window, tau=settings.tau, sparsity_weight=settings.sparsity_weight
        )
        metadata = self._metadata(shape, settings, sum(map(len, training)))
        gate = metadata.empty_gate().to(self.device)
        history = train_write_gate(self.model, gate, training, settings, self._checkpoint("gate", metadata))
        results = evaluate(self.model, gate, testing, settings) if testing else {}
        return gate, metadata.model_copy(update={"results": results}), history

    def _sink(self, settings: Any) -> tuple[Any, Any, Any]:
        from vllm_kvplug.gates.backbone import cut_texts
        from vllm_kvplug.gates.files import SinkGateShape
        from vllm_kvplug.gates.targets import Frame
        from vllm_kvplug.gates.train_sink import HELD_OUT, train_sink_gate

        shape = SinkGateShape(hidden_size=self.model.config.hidden_size, dim=settings.dim, sinks=settings.sinks)
        arguments = (self.tokenizer, self.texts, settings.length, HELD_OUT, settings.tokens)
        contexts = cut_texts(*arguments, special_tokens=False)
        frame = Frame.of(self.tokenizer)
        self._check_length(contexts, frame, settings.chunk)
        metadata = self._metadata(shape, settings, sum(map(len, contexts)))
        gate = metadata.empty_gate().to(self.device)
        checkpoint, memory = self._checkpoint("", metadata), self.args.memory_gib * 2**30
        history, results = train_sink_gate(self.model, gate, contexts, frame, settings, checkpoint, memory)
        return gate, metadata.model_copy(update={"results": results}), history

    def _check_length(self, contexts: list[Any], frame: Any, chunk: int) -> None:
        limit = self.model.config.max_position_embeddings
        for context in contexts:
            longest = max(len(repetition) for _, _, repetition in frame.repetitions(context, chunk))
            needed = len(frame.before) + len(context) + longest
            if needed > limit:
                raise PolicyError(
                    f"train-gate: a context of {len(context)} tokens and its repetition need {needed} positions, the "
                    f"model has {limit}: lower --length to {limit - needed + len(context)}"
                )

    def _checkpoint(self, name: str, metadata: Any) -> Any:
        from vllm_kvplug.gates.training import Checkpoint

        return Checkpoint(self.progress / name, metadata.model_dump_json(exclude={"date", "versions"}))

    def _metadata(self, shape: Any, settings: Any, tokens: int) -> Any:
        from vllm_kvplug.calibrate.command import versions
        from vllm_kvplug.calibrate.profile import ProfiledModel, weights_hash
        from vllm_kvplug.gates.files import GateMetadata, TextFile

        files = [
            TextFile(name=file.name, sha256=hashlib.sha256(file.read_bytes()).hexdigest()) for file in self.args.texts
        ]
        return GateMetadata(
            model=ProfiledModel.of(self.model.config, self.folder.name),
            gate=shape,
            source="kvplug train-gate",
            date=datetime.date.today().isoformat(),
            weights_hash=weights_hash(self.folder),
            training=settings.model_dump(exclude_none=True),
            files=tuple(files),
            tokens=tokens,
            versions=versions(str(self.model.dtype).removeprefix("torch.")),
        )


# ---------------------------------------------------------------- import
def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=["wgkv", "fastkvzip"])
    parser.add_argument("model", metavar="MODEL", help="model folder or Hugging Face id that the gate is for")
    parser.add_argument("file", metavar="FILE", type=Path, help="the authors' .pt file")
    parser.add_argument("--out", type=Path, required=True, help="gate to write")
    parser.add_argument("--int8", action="store_true", help="store matrices in 8 bits instead of bfloat16")
    parser.add_argument(
        "--double-bias",
        action="store_true",
        help="fastkvzip: the bias as the released trainer used it, which added it twice",
    )


def import_gate(args: argparse.Namespace) -> None:
    from transformers import AutoConfig

    from vllm_kvplug.gates.files import save_gate
    from vllm_kvplug.gates.released import import_sink_gate, import_write_gate

    if args.double_bias and args.kind == "wgkv":
        raise PolicyError("import-gate: --double-bias is for fastkvzip, a write gate has no such bias")
    config, name = AutoConfig.from_pretrained(args.model), Path(args.model).name
    gate: Any
    if args.kind == "wgkv":
        gate, metadata = import_write_gate(args.file, config, name)
    else:
        gate, metadata = import_sink_gate(args.file, config, name, args.double_bias)
    save_gate(args.out, gate, metadata, args.int8)
    report(metadata, args.out, None)


def report(metadata: Any, out: Path, picture: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{metadata.kind} gate of {metadata.model.name}", show_header=False)
    for name, value in {**metadata.gate.model_dump(), **metadata.results}.items():
        if isinstance(value, list):
            value = " ".join(f"{entry:.2f}" for entry in value)
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    console = Console()
    console.print(table)
    console.print(f"written to {out}" + (f", curves to {picture}" if picture else ""), highlight=False, soft_wrap=True)
