"""What both trainings share: the loop over steps, its checkpoint, the order of samples, the picture of its losses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.optim import Optimizer
from tqdm import tqdm

from vllm_kvplug.errors import PolicyError
from vllm_kvplug.gates.files import write_safetensors
from vllm_kvplug.spread import ALONE, Ranks

History = dict[str, list[float]]
"""One number a step and name."""

Step = Callable[[int], dict[str, float]]
"""Step number -> what to write down; leaves the gate's gradients behind."""


def samples(step: int, count: int, batch: int, seed: int) -> Tensor:
    """Indices [batch] that `step` sees: passes over 0..count-1, each in a new order, incomplete batches left out.

    A function of its arguments alone, so that a resumed run goes on with the samples it would have seen.
    """
    turn, place = divmod(step, max(count // batch, 1))
    return _order(count, seed, turn)[place * batch : (place + 1) * batch]


@lru_cache(maxsize=1)
def _order(count: int, seed: int, turn: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed + 1_000_003 * turn))


@dataclass(frozen=True)
class Checkpoint:
    """A training that can go on: weights and optimizer state as safetensors, the rest as JSON in its metadata.

    identity  what has to be the same for going on to make sense
    every     steps from one save to the next
    """

    path: Path
    identity: str
    every: int = 100

    def save(self, gate: nn.Module, optimizer: Optimizer, step: int, history: History) -> None:
        tensors = {f"weight/{name}": parameter.detach() for name, parameter in gate.named_parameters()}
        for name, parameter in gate.named_parameters():
            for key, value in optimizer.state[parameter].items():
                tensors[f"{key}/{name}"] = value
        progress = json.dumps({"step": step, "history": history})
        write_safetensors(self.path, tensors, {"identity": self.identity, "progress": progress})

    def load(self, gate: nn.Module, optimizer: Optimizer) -> tuple[int, History]:
        """(steps done, history), and puts what was saved in place; (0, {}) if nothing was."""
        if not self.path.exists():
            return 0, {}
        with safe_open(self.path, framework="pt") as file:
            metadata = file.metadata()
            if metadata["identity"] != self.identity:
                raise PolicyError(
                    f"train-gate: {self.path} is from a run with other settings, texts or weights: remove it, or "
                    "choose another --out"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        for name, parameter in gate.named_parameters():
            parameter.data.copy_(tensors.pop(f"weight/{name}"))
            for full in [full for full in tensors if full.endswith(f"/{name}")]:
                value = tensors[full]  # counters stay where torch keeps them, on the CPU
                value = value.to(parameter.device) if value.dim() else value
                optimizer.state[parameter][full.split("/")[0]] = value
        progress = json.loads(metadata["progress"])
        return progress["step"], progress["history"]


def run_steps(
    gate: nn.Module,
    optimizer: Optimizer,
    learning_rate: Callable[[int], float],
    step: Step,
    steps: int,
    checkpoint: Checkpoint,
    label: str,
    ranks: Ranks = ALONE,
) -> History:
    """Go on from the checkpoint to `steps`. `learning_rate` and `step` are functions of the step's number alone.

    Of ranks, all take the same steps, and the first one saves. Raises PolicyError if they found different checkpoints.
    """
    done, history = checkpoint.load(gate, optimizer)
    if not ranks.agree(done):
        raise PolicyError("train-gate: nodes see different files: give an --out in a folder that all of them share")
    first = ranks.rank == 0
    with tqdm(range(done, steps), initial=done, total=steps, desc=label, unit="step", disable=not first) as bar:
        for number in bar:
            optimizer.zero_grad(set_to_none=True)
            seen = step(number)
            if not all(map(math.isfinite, seen.values())):
                raise PolicyError(f"train-gate: step {number} gives {seen}: lower --learning-rate")
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(number)
            optimizer.step()
            for name, value in seen.items():
                history.setdefault(name, []).append(value)
            bar.set_postfix({name: f"{value:.4g}" for name, value in seen.items()}, refresh=False)
            if first and ((number + 1) % checkpoint.every == 0 or number + 1 == steps):
                checkpoint.save(gate, optimizer, number + 1, history)
    return history


def plot_history(history: History, path: Path, title: str) -> bool:
    """Draw every curve of a run as PNG; False, and nothing drawn, without matplotlib."""
    if find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(history), 3.5), layout="constrained")
    figure.suptitle(title)
    for axes, (name, values) in zip(figure.subplots(1, len(history), squeeze=False)[0], history.items(), strict=True):
        axes.plot(values, linewidth=0.8)
        axes.set(title=name, xlabel="step")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    return True
