"""A live request as the worker sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import torch

from vllm_kvplug.lifecycle import Admission
from vllm_kvplug.plan import PagePlan, Plan
from vllm_kvplug.policies.base import Policy
from vllm_kvplug.selection import Layout
from vllm_kvplug.tiers.lane import Ticket


@dataclass
class Flight:
    """A cluster's tokens on their way from the host.

    due: the request's length in the first step that sees them. heads: flat heads of this rank. positions: int64,
    ascending, one tensor per head. staged: where they wait, or None if staging was full. pieces: fetches that the
    limit per step still holds back. ticket: of the last fetch submitted.
    """

    cluster: int
    due: int
    heads: list[int]
    positions: list[torch.Tensor]
    staged: slice | None
    pieces: list[Any] = field(default_factory=list)
    ticket: Ticket | None = None


@dataclass
class Check:
    """A drift check whose outcome is on its way to the host.

    length: of the request at the check. flags: bool [local clusters], in host memory once `ready` has happened.
    orders: rankings of the newest query of each local cluster's pivot, on the device.
    """

    length: int
    clusters: list[int]
    flags: torch.Tensor
    orders: list[torch.Tensor]
    ready: Any


@dataclass
class Offloaded:
    """A request's share of the host tier, and its retrievals.

    heads: flat heads of this rank whose prompt is there, int64 [n], ascending, on the device. slots: int64
    [n, host slots] on the CPU. row: by flat head, its place in both. of_layer: by layer, where its heads stand in
    them, and which heads of the layer these are, int64 on the device. base_head: by cluster whose pivot this rank
    holds, the KV head of the rank that made the baseline.
    """

    heads: torch.Tensor
    slots: torch.Tensor
    row: dict[int, int]
    of_layer: dict[int, tuple[slice, torch.Tensor]]
    base_head: dict[int, int]
    flights: dict[int, Flight] = field(default_factory=dict)
    check: Check | None = None

    @classmethod
    def of(
        cls, heads: list[int], slots: torch.Tensor, kv_heads: int, base_head: dict[int, int], device: torch.device
    ) -> Self:
        """heads: flat and ascending; kv_heads: of a layer."""
        on_device = torch.tensor(heads, dtype=torch.int64).to(device, non_blocking=True)
        layers = [head // kv_heads for head in heads]
        of_layer = {}
        for layer in dict.fromkeys(layers):
            place = slice(layers.index(layer), layers.index(layer) + layers.count(layer))
            of_layer[layer] = (place, on_device[place] - layer * kv_heads)
        return cls(on_device, slots, {head: i for i, head in enumerate(heads)}, of_layer, base_head)

    def slots_of(self, head: int) -> torch.Tensor:
        """Host slots of a flat head, int64 [host slots]."""
        return self.slots[self.row[head]]


@dataclass
class Selected:
    """A request that selects: where its heads keep what, its host slots int64 [n], and the last store of its prompt."""

    layout: Layout
    slots: torch.Tensor
    stored: Ticket | None = None


@dataclass
class LiveRequest:
    """A request that holds blocks.

    prefill_end: tokens after which its prompt is cut. prompt_len: tokens of the whole prompt, behind which it decodes.
    policy, plan: as its options make them. row: block ids in this step, int32 [1, n].
    """

    slot: int
    prefill_end: int
    prompt_len: int
    policy: Policy
    plan: Plan
    offloaded: Offloaded | None = None
    row: torch.Tensor | None = None
    selected: Selected | None = None

    @classmethod
    def admit(cls, slot: int, admission: Admission, policy: Policy) -> LiveRequest:
        served = policy.for_request(admission.options)
        return cls(slot, admission.prefill_end, admission.tokens, served, served.plan())

    @property
    def cut_at_end(self) -> bool:
        """Whether every head is cut to a budget of its own when the prompt is complete."""
        return isinstance(self.plan, PagePlan) and self.plan.shrinks
