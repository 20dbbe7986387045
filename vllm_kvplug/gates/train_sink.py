"""Training of Fast KVzip's gate on KVzip's reconstruction scores.

Layers are independent: each learns from its own hidden states. They are trained in groups whose hidden states fit in
memory, and the texts are read again for every group: a million tokens of an 8B model have 300 GB of hidden states,
and reading them again takes minutes. The targets, which take the long forward passes and are small, are kept in a file.
Shapes: L layers, H KV heads, T tokens of all contexts, D hidden size.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from pydantic import Field
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from vllm_kvplug.errors import PolicyError
from vllm_kvplug.gates.backbone import Backbone
from vllm_kvplug.gates.files import Frozen, write_safetensors
from vllm_kvplug.gates.sink_gate import SinkGate
from vllm_kvplug.gates.targets import Frame, hidden_states, reconstruction_targets
from vllm_kvplug.gates.training import Checkpoint, History, run_steps, samples
from vllm_kvplug.spread import Spread

HELD_OUT = 100
"""Every so many tokens, one is for testing only."""


class SinkTraining(Frozen):
    """Settings of a run; defaults are the released ones."""

    dim: int = Field(default=16, ge=1, description="D', of the gate's queries and keys")
    sinks: int = Field(default=16, ge=1, description="S, sink keys a head")
    chunk: int = Field(default=2000, ge=1, description="tokens repeated at a time")
    length: int = Field(default=30_000, ge=HELD_OUT, description="most tokens of a context")
    tokens: int = Field(default=1_000_000, ge=HELD_OUT, description="tokens of all contexts")
    steps: int = Field(default=5000, ge=1)
    batch: int = Field(default=1000, ge=1, description="tokens a step")
    learning_rate: float = Field(default=0.2, gt=0)
    seed: int = 0


def rate(steps: int, peak: float, step: int) -> float:
    """The released schedule: a slow start of a hundredth of the steps, half from the middle, a quarter at the end."""
    if step < 0.01 * steps:
        return peak * 0.01 * step
    return peak * (1.0 if step < 0.5 * steps else 0.5 if step < 0.75 * steps else 0.25)


def sink_step(gate: SinkGate, hidden: Tensor, targets: Tensor) -> dict[str, float]:
    """Add the gradients of one batch to the gate's: attention inputs [L, tokens, D], targets [L, H, tokens].

    Soft-label cross-entropy, mean over tokens, sum over heads and layers, so that no layer depends on another.
    """
    scores = gate.score(slice(None), hidden)
    loss = F.binary_cross_entropy(scores, targets, reduction="none").mean(-1).sum()
    loss.backward()
    return {"loss": loss.item() / len(targets)}


def train_sink_gate(
    backbone: Backbone,
    gate: SinkGate,
    contexts: list[Tensor],
    frame: Frame,
    settings: SinkTraining,
    checkpoint: Checkpoint,
    memory: float,
    workers: Spread,
) -> tuple[History, dict[str, float | list[float]]]:
    """Train `gate`; returns losses (mean over layers) and results on held-out tokens.

    checkpoint  its path is a folder: targets and every group of layers have a file in it
    memory      bytes for hidden states, on every device of the workers
    """
    saved = replace(checkpoint, path=checkpoint.path / "targets")
    targets = _targets(backbone, contexts, frame, settings.chunk, saved, workers)
    layers, _, total = targets.shape
    fit = int(memory // (total * backbone.config.hidden_size * backbone.dtype.itemsize))
    size = _layers_a_group(checkpoint.path, max(fit, 1), layers, workers.slots)
    groups = [slice(first, min(first + size, layers)) for first in range(0, layers, size)]
    jobs = (
        # The clone, since a view would take the targets of all layers along to another process.
        (backbone, gate.part(group), contexts, frame, targets[group].clone(), group, settings, checkpoint)
        for group in groups
    )
    losses, results = torch.zeros(settings.steps), list[dict[str, float]]()
    for group, (part, history, found) in zip(groups, workers.map(_train_group, jobs), strict=True):
        gate.put(group, part)
        losses += torch.tensor(history["loss"]) * len(found) / layers
        results += found
    return {"loss": losses.tolist()}, _summary(results)


def _layers_a_group(folder: Path, fit: int, layers: int, slots: int) -> int:
    """As many as an earlier run had, whose files are of its groups; else one group a slot. At most what fits."""
    edges = [list(map(int, file.name.split("-")[1:])) for file in folder.glob("layers-*[0-9]")]
    whole = [last - first for first, last in edges if first == 0 or last < layers]  # the last group may be smaller
    return min(max(whole, default=-(-layers // slots)), fit)


def _train_group(
    backbone: Backbone,
    gate: SinkGate,
    contexts: list[Tensor],
    frame: Frame,
    targets: Tensor,
    group: slice,
    settings: SinkTraining,
    checkpoint: Checkpoint,
) -> tuple[SinkGate, History, list[dict[str, float]]]:
    """Train the gate of a group of layers: itself, on the CPU, its losses, and per layer its results."""
    hidden = hidden_states(backbone.model, frame, contexts, group)
    targets, gate = targets.to(hidden.device), gate.to(hidden.device)
    train = torch.arange(hidden.shape[1])
    train = train[train % HELD_OUT != 0]
    optimizer = torch.optim.SGD(gate.parameters(), lr=settings.learning_rate, momentum=0.9)

    def step(number: int) -> dict[str, float]:
        chosen = train[samples(number, len(train), min(settings.batch, len(train)), settings.seed)]
        chosen = chosen.to(hidden.device)
        return sink_step(gate, hidden[:, chosen].float(), targets[..., chosen])

    schedule = partial(rate, settings.steps, settings.learning_rate)
    saved = replace(checkpoint, path=checkpoint.path / f"layers-{group.start}-{group.stop}")
    label = f"fastkvzip, layers {group.start} to {group.stop - 1}"
    history = run_steps(gate, optimizer, schedule, step, settings.steps, saved, label)
    found = _held_out(gate, hidden, targets)
    return gate.cpu(), history, found


def _targets(
    backbone: Backbone, contexts: list[Tensor], frame: Frame, chunk: int, saved: Checkpoint, workers: Spread
) -> Tensor:
    """float32 [L, H, T] of all contexts, from the file of an earlier run if there is one."""
    if saved.path.exists():
        with safe_open(saved.path, framework="pt") as file:
            if file.metadata()["identity"] != saved.identity:
                raise PolicyError(
                    f"train-gate: {saved.path} is from a run with other settings, texts or weights: remove its folder, "
                    "or choose another --out"
                )
            return file.get_tensor("targets")
    jobs = [(backbone, part, frame, chunk) for part in workers.parts(contexts)]
    targets = torch.cat(workers.map(_targets_of, jobs), dim=-1)
    write_safetensors(saved.path, {"targets": targets}, {"identity": saved.identity})
    return targets


def _targets_of(backbone: Backbone, contexts: list[Tensor], frame: Frame, chunk: int) -> Tensor:
    bar = tqdm(contexts, desc="reconstruction targets", unit="text")
    return torch.cat([reconstruction_targets(backbone.model, frame, context, chunk) for context in bar], dim=-1)


# ---------------------------------------------------------------- on held-out tokens
@torch.no_grad()
def _held_out(gate: SinkGate, hidden: Tensor, targets: Tensor) -> list[dict[str, float]]:
    """Per layer: loss, rank correlation and recall at 30%, the last two as means over heads."""
    hidden, targets = hidden[:, ::HELD_OUT], targets[..., ::HELD_OUT]
    scores = gate.score(slice(None), hidden.float())
    loss = F.binary_cross_entropy(scores, targets, reduction="none").mean(-1).sum(-1)
    columns = {"loss": loss, "rank_correlation": rank_correlation(scores, targets).mean(-1)}
    columns["recall30"] = recall(scores, targets, 0.3).mean(-1)
    return [{name: column[layer].item() for name, column in columns.items()} for layer in range(len(loss))]


def _summary(layers: list[dict[str, float]]) -> dict[str, float | list[float]]:
    results: dict[str, float | list[float]] = {}
    for name in layers[0]:
        values = [layer[name] for layer in layers]
        results[name] = sum(values) / len(values)
        results[f"{name}_of_layers"] = values
    return results


def rank_correlation(a: Tensor, b: Tensor) -> Tensor:
    """Spearman's, along the last dimension; equal values share their mean rank."""

    def ranks(x: Tensor) -> Tensor:
        x = x.contiguous()
        order = x.sort(-1).values
        below, up_to = torch.searchsorted(order, x), torch.searchsorted(order, x, right=True)
        rank = (below + up_to).double()
        return rank - rank.mean(-1, keepdim=True)

    a, b = ranks(a), ranks(b)
    spread = (a.square().sum(-1) * b.square().sum(-1)).sqrt()
    return ((a * b).sum(-1) / spread.clamp(min=1e-12)).float()


def recall(scores: Tensor, targets: Tensor, share: float) -> Tensor:
    """How much of the top `share` of targets, along the last dimension, is in the top `share` of scores."""
    size = max(round(share * scores.shape[-1]), 1)

    def top(x: Tensor) -> Tensor:
        return torch.zeros_like(x, dtype=torch.bool).scatter(-1, x.topk(size).indices, True)

    return (top(scores) & top(targets)).sum(-1) / size
