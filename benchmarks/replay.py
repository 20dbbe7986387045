"""Does it matter which tokens a write gate admits, or only how many? (WG-KV, 2512.17452, the replay experiment)

    python -m benchmarks.replay MODEL --tasks tasks.py --texts corpus.jsonl ... --out FILE [--pairs 100]
        [--length 2048] [--gate FILE] [--minutes M]

Every sequence is read with full attention, then behind masks of admitted tokens: its own gate's ("own"); those that the
gate chose for another sequence of the same length ("replayed"); and its own ones in a random order, head by head, so
that each head admits as many ("random"). A random order mostly loses the first tokens, which models attend to whatever
they are, so a fourth mask is random but for the first 4. Figures are mean squared distances of the last hidden states
from those of full attention, means over sequences. Half of the sequences are prompts of the tasks' eval split, half
texts; neighbours of a shuffled circle exchange masks. After --minutes the circle closes where it is.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import report
from benchmarks.eval_tasks import examples, load_tasks
from vllm_kvplug.calibrate.command import read_texts
from vllm_kvplug.calibrate.profile import ProfiledModel
from vllm_kvplug.gates.backbone import Backbone, cut_texts
from vllm_kvplug.gates.files import WriteGateShape, find_gate, load_gate
from vllm_kvplug.gates.train_write import GateOf, own_gates, write_gated
from vllm_kvplug.rotary import Rotary

WAYS = ("own", "replayed", "random", "random_but_first")
FIRST = 4


class Student:
    """A model that attends to what a write gate admits, with the threshold in place."""

    def __init__(self, folder: Path, gate_file: str | None, device: str):
        backbone = Backbone(folder, device)
        profiled = ProfiledModel.of(backbone.config, str(folder))
        path = find_gate("wgkv", gate_file, profiled.fingerprint, str(folder))
        gate, metadata = load_gate("wgkv", path, profiled)
        assert isinstance(metadata.gate, WriteGateShape)
        self.model, self.window, self.tau = backbone.model, metadata.gate.window, metadata.gate.tau
        self._own = own_gates(gate.to(device), Rotary.of(backbone.config))

    def full(self, ids: Tensor) -> Tensor:
        """Last hidden states [T, D] of ids [T], with full attention."""
        return self.model.base_model(ids[None], use_cache=False).last_hidden_state[0]

    def admitting(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Last hidden states behind the model's own gate, and what it admitted: by layer float32 [H, T] of 0 and 1."""
        masks: list[Tensor] = []

        def gate_of(layer: int, keys: Tensor) -> Tensor:
            masks.append((self._own(layer, keys) > self.tau).float())
            return masks[-1]

        return self._behind(ids, gate_of), masks

    def replaying(self, ids: Tensor, masks: list[Tensor]) -> Tensor:
        return self._behind(ids, lambda layer, keys: masks[layer])

    def _behind(self, ids: Tensor, gate_of: GateOf) -> Tensor:
        with write_gated(self.model, gate_of, self.window):
            return self.full(ids)


def shuffled(masks: list[Tensor], first: int, generator: torch.Generator) -> list[Tensor]:
    """Every head's row of [H, T] in an order of its own, but for its first tokens."""
    orders = [torch.rand(mask[:, first:].shape, generator=generator).argsort(1) + first for mask in masks]
    return [
        torch.cat([mask[:, :first], mask.gather(1, order.to(mask.device))], 1)
        for mask, order in zip(masks, orders, strict=True)
    ]


@torch.no_grad()
def measure(student: Student, sequences: list[Tensor], minutes: float | None, seed: int) -> list[dict[str, Any]]:
    """Distances by way, and the share of tokens that each way admits, of every sequence in turn."""
    generator, began = torch.Generator().manual_seed(seed), time.monotonic()
    rows: list[dict[str, Any]] = []
    first: list[Tensor] | None = None
    waiting: tuple[Tensor, Tensor, list[Tensor]] | None = None

    def replay(of: tuple[Tensor, Tensor, list[Tensor]], masks: list[Tensor]) -> None:
        ids, teacher, _ = of
        rows[-1]["replayed"] = F.mse_loss(student.replaying(ids, masks), teacher).item()
        rows[-1]["replayed_admitted"] = fmean(mask.mean().item() for mask in masks)
        print(rows[-1], flush=True)

    for ids in sequences:
        teacher = student.full(ids)
        output, masks = student.admitting(ids)
        if waiting is not None:
            replay(waiting, masks)
        rows.append({"own": F.mse_loss(output, teacher).item()})
        for name, kept in (("random", 0), ("random_but_first", FIRST)):
            behind = student.replaying(ids, shuffled(masks, kept, generator))
            rows[-1][name] = F.mse_loss(behind, teacher).item()
        rows[-1]["admitted"] = fmean(mask.mean().item() for mask in masks)
        first, waiting = first or masks, (ids, teacher, masks)
        if minutes is not None and time.monotonic() - began > 60 * minutes:
            break
    assert first is not None and waiting is not None
    replay(waiting, first)
    return rows


def prompts(tasks: Path, model: str, tokenizer: Any, length: int, count: int, seed: int) -> list[Tensor]:
    """The first `length` tokens of prompts of all tasks in turn."""
    each = -(-count // len((source := load_tasks(tasks)).TASKS))
    made = examples(source, tokenizer, model, length + length // 2, each, seed)
    return [torch.tensor(e["ids"][:length]) for e in made if len(e["ids"]) >= length]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tasks", type=Path, required=True)
    parser.add_argument("--texts", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--gate", help="default: the one that comes with the project for this architecture")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--seed", type=int, default=9001)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer, draw = AutoTokenizer.from_pretrained(args.model), random.Random(args.seed)
    half = -(-args.pairs // 2)
    asked = prompts(args.tasks, args.model, tokenizer, args.length, half, args.seed)
    texts = cut_texts(tokenizer, read_texts(args.texts), args.length, args.length, None)
    chosen = draw.sample(asked, min(half, len(asked))) + draw.sample(texts, min(args.pairs - half, len(texts)))
    draw.shuffle(chosen)
    student = Student(Path(args.model), args.gate, args.device)
    rows = measure(student, [ids.to(args.device) for ids in chosen], args.minutes, args.seed)
    metrics: dict[str, float] = {"replay.pairs": len(rows), "replay.length": args.length}
    for way in WAYS:
        found = [row[way] for row in rows]
        metrics[f"replay.{way}_mse"] = fmean(found)
        metrics[f"replay.{way}_standard_error"] = stdev(found) / len(found) ** 0.5
    metrics["replay.admitted"] = fmean(row["admitted"] for row in rows)
    metrics["replay.own_is_best"] = fmean(row["own"] == min(row[way] for way in WAYS) for row in rows)
    print(metrics)
    report.write(args.out, report.result("replay", metrics, rows))


if __name__ == "__main__":
    main()
