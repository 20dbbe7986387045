"""Training of WG-KV's write gate: distil the plain model into itself with write-gated attention.

Attention runs over blocks of queries with torch's own kernel and an additive mask, on CPU and CUDA alike. FlexAttention
would not write the mask to memory, but has no backward pass on a CPU and compiles anew for every length; here a mask
never holds more than a block of queries, and the loop also skips the half of the matrix that no query sees.
Shapes: L layers, H KV heads, G query heads a KV head, T tokens, d head dim. One sequence at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from vllm_kvplug.gates.backbone import attention_replaced
from vllm_kvplug.gates.files import Frozen
from vllm_kvplug.gates.training import Checkpoint, History, run_steps, samples
from vllm_kvplug.gates.write_gate import WriteGate
from vllm_kvplug.rotary import Rotary
from vllm_kvplug.spread import ALONE, Ranks

SMALLEST = 1e-3
"""Gates are clamped to this while training: a token is never quite out of sight, so its gate gets a gradient."""

QUERY_BLOCK = 1024

DIFFERENTIATE_MASKS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""torch's attention kernels whose backward pass has a gradient for the mask."""

GateOf = Callable[[int, Tensor], Tensor]
"""(layer, rotated keys [H, T, d]) -> gates [H, T] in [0, 1]."""


class WriteTraining(Frozen):
    """Settings of a run; defaults are the released ones."""

    hidden: int | None = Field(default=None, ge=1, description="hidden units a head; 4 times the head dim")
    window: int = Field(default=256, ge=1, description="W, the local window in which gates do not matter")
    sparsity_weight: float = Field(default=0.04, ge=0, description="lambda: higher admits less")
    sparsity: Literal["remaining", "paper"] = Field(
        default="remaining", description="weigh a token's gate by the share of its life outside the window, or not"
    )
    tau: float = Field(default=0.1, ge=0, le=1, description="admission threshold, for what is reported")
    length: int = Field(default=4096, ge=2, description="most tokens of a sequence")
    batch: int = Field(default=1, ge=1, description="sequences a step")
    steps: int | None = Field(default=None, ge=1, description="one pass over the texts")
    learning_rate: float = Field(default=1e-3, gt=0)
    seed: int = 0


# ---------------------------------------------------------------- write-gated attention
def gated_attention(query: Tensor, key: Tensor, value: Tensor, gates: Tensor, window: int, scale: float) -> Tensor:
    """query [H, G, T, d], key and value [H, T, d], gates [H, T] -> [H, G, T, d].

    Query i sees key j with bias log(gate of j), or none if i - j < window. Gates of 0 and 1 are a mask.
    """
    tokens = query.shape[2]
    log_gates = gates.log()
    key, value = (x[:, None].expand(-1, query.shape[1], -1, -1) for x in (key, value))
    blocks = []
    for first in range(0, tokens, QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, tokens)
        age = torch.arange(first, last, device=query.device)[:, None] - torch.arange(last, device=query.device)
        bias = torch.where(age < window, 0.0, log_gates[:, None, None, :last])  # [H, 1, block, last]
        bias = bias.masked_fill(age < 0, -torch.inf).to(query.dtype).expand(-1, query.shape[1], -1, -1)
        part = query[:, :, first:last], key[:, :, :last], value[:, :, :last], bias
        # Without gradients, torch 2.11's memory-efficient kernel reads outside of memory here.
        with sdpa_kernel(DIFFERENTIATE_MASKS if torch.is_grad_enabled() else SDPBackend.MATH):
            blocks.append(F.scaled_dot_product_attention(*part, scale=scale))
    return torch.cat(blocks, dim=2)


@contextmanager
def write_gated(model: PreTrainedModel, gate_of: GateOf, window: int) -> Iterator[None]:
    """While open, the model attends through gates. For one sequence from its first token, without a cache.

    Replaying other gates than the model's own is a `gate_of` that ignores its keys.
    """

    def attend(module, query, key, value, attention_mask, scaling=None, **kwargs):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        gates = gate_of(module.layer_idx, key[0])
        grouped = query[0].unflatten(0, (key.shape[1], -1))
        out = gated_attention(grouped, key[0], value[0], gates, window, scale)
        return out.flatten(0, 1).transpose(0, 1)[None], None  # [1, T, Hq, d]

    with attention_replaced(model, "kvplug_write_gated", attend):
        yield


def own_gates(gate: WriteGate, rotary: Rotary) -> GateOf:
    """A model's own gates. Keys are un-rotated as a server does it, so training sees a server's rounding too."""

    def gate_of(layer: int, keys: Tensor) -> Tensor:
        positions = torch.arange(keys.shape[1], device=keys.device)
        return gate.score(layer, rotary.unrotate(keys, positions), keys)

    return gate_of


# ---------------------------------------------------------------- losses
def sparsity_loss(gates: Tensor, window: int, form: Literal["remaining", "paper"]) -> Tensor:
    """gates [L, H, T] -> scalar in [0, 1]. 1 - (1 - g)^2 is g + g(1 - g): small, and far from undecided.

    remaining: as released. Near the end of a sequence most of a token's remaining life is inside the window, where
    its gate decides nothing, so pressure on it fades. paper: the same pressure everywhere.
    """
    pressure = 1 - (1 - gates).square()
    if form == "paper":
        return pressure.mean()
    remaining = gates.shape[-1] - torch.arange(gates.shape[-1], device=gates.device)
    local = (window / remaining).clamp(max=1)
    return (local + (1 - local) * pressure).mean()


@contextmanager
def layers_recomputed(model: PreTrainedModel) -> Iterator[None]:
    """While open, a backward pass holds the activations of one layer at a time."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer.training = True  # what transformers asks for; modules inside stay as they are, so nothing drops out
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()
        for layer in layers:
            layer.training = False


def write_step(
    model: PreTrainedModel, gate: WriteGate, rotary: Rotary, ids: Tensor, settings: WriteTraining
) -> dict[str, float]:
    """Add the gradients of one sequence, ids [T], to the gate's, and return what to report."""
    with torch.no_grad():
        teacher = model.base_model(ids[None], use_cache=False).last_hidden_state
    gates: dict[int, Tensor] = {}
    own = own_gates(gate, rotary)

    def gate_of(layer: int, keys: Tensor) -> Tensor:
        gates[layer] = own(layer, keys).clamp(min=SMALLEST)
        return gates[layer]

    with write_gated(model, gate_of, settings.window):  # also around backward(), which computes layers again
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=model.dtype == torch.bfloat16):
            student = model.base_model(ids[None], use_cache=False).last_hidden_state
        stacked = torch.stack([gates[layer] for layer in sorted(gates)])
        distance = F.mse_loss(student.float(), teacher.float())
        sparsity = sparsity_loss(stacked, settings.window, settings.sparsity)
        loss = distance + settings.sparsity_weight * sparsity
        loss.backward()
    admitted = (stacked > settings.tau).float().mean()
    seen = {"loss": loss, "distance": distance, "sparsity": sparsity, "admitted": admitted}
    return {name: value.item() for name, value in seen.items()}


# ---------------------------------------------------------------- the run
def rate(steps: int, peak: float, step: int) -> float:
    """A tenth of the steps up, linearly; the rest down to zero, along a cosine."""
    rise = max(steps // 10, 1)
    if step < rise:
        return peak * (step + 1) / rise
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(steps - rise, 1)))


def train_write_gate(
    model: PreTrainedModel,
    gate: WriteGate,
    sequences: list[Tensor],
    settings: WriteTraining,
    checkpoint: Checkpoint,
    ranks: Ranks = ALONE,
) -> History:
    """Train `gate`, which lies on the model's device, on sequences of token ids.

    A step sees `settings.batch` sequences, of which every rank takes its share, and moves along their mean gradient:
    the same on all ranks, and that of one rank up to the order of its sum. There must be a sequence for each.
    """
    optimizer = torch.optim.AdamW(gate.parameters(), lr=settings.learning_rate, weight_decay=0.01)
    batch = min(settings.batch, len(sequences))
    rotary, steps = Rotary.of(model.config), settings.steps or len(sequences) // batch

    def step(number: int) -> dict[str, float]:
        chosen = samples(number, len(sequences), batch, settings.seed)[ranks.rank :: ranks.count].tolist()
        seen = [write_step(model, gate, rotary, sequences[i].to(model.device), settings) for i in chosen]
        total = torch.tensor([list(s.values()) for s in seen], dtype=torch.float64, device=model.device).sum(0)
        gradients = [weight.grad for weight in gate.parameters() if weight.grad is not None]
        ranks.add_up([total, *gradients])
        for gradient in gradients:
            gradient /= batch
        return dict(zip(seen[0], (total / batch).tolist(), strict=True))

    schedule = partial(rate, steps, settings.learning_rate)
    with layers_recomputed(model):
        return run_steps(gate, optimizer, schedule, step, steps, checkpoint, "wgkv", ranks)


@torch.no_grad()
def hidden_distance(model: PreTrainedModel, ids: Tensor, gate_of: GateOf, window: int) -> float:
    """MSE of the last hidden states under those gates against the plain model, ids [T]."""
    teacher = model.base_model(ids[None], use_cache=False).last_hidden_state
    with write_gated(model, gate_of, window):
        student = model.base_model(ids[None], use_cache=False).last_hidden_state
    return F.mse_loss(student.float(), teacher.float()).item()


@torch.no_grad()
def evaluate(
    model: PreTrainedModel, gate: WriteGate, sequences: list[Tensor], settings: WriteTraining
) -> dict[str, float]:
    """Means over sequences of what admission with the threshold gives: the distance, and the share admitted."""
    own = own_gates(gate, Rotary.of(model.config))
    distances, shares = [], []

    def admission(layer: int, keys: Tensor) -> Tensor:
        admitted = (own(layer, keys) > settings.tau).float()
        shares.append(admitted.mean().item())
        return admitted

    for ids in sequences:
        distances.append(hidden_distance(model, ids.to(model.device), admission, settings.window))
    return {"distance": sum(distances) / len(distances), "admitted": sum(shares) / len(shares)}
