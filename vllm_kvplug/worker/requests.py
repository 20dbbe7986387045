"""A live request as the worker sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from vllm_kvplug.lifecycle import Admission
from vllm_kvplug.plan import PagePlan, Plan, SharedPlan
from vllm_kvplug.policies.base import Policy
from vllm_kvplug.selection import Layout
from vllm_kvplug.tiers.lane import Ticket


@dataclass(eq=False)
class Flight:
    """Tokens of one request on their way from the host, for the satellites of the clusters that one check found.

    due: the request's length in the first step that sees them. staged: where they wait in staging, or None if
    staging was full. target, positions, rows: their token slots, positions, and rows of the host pool, int64 [tokens],
    but positions int32, as tables hold them. pieces: parts of them that the limit per step still holds back. ticket: of
    the last part submitted.
    """

    clusters: list[int]
    due: int
    staged: slice | None
    target: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    pieces: list[slice] = field(default_factory=list)
    ticket: Ticket | None = None


@dataclass
class Check:
    """A drift check whose outcome is on its way to the host.

    length: of the request at the check. clusters: that were checked, of which this rank holds the pivot. in_flight:
    clusters that had something in flight then, whatever their flags say. flags: bool [clusters], in host memory once
    `ready` has happened. scores: of each pivot's newest query, float32 [clusters, T], on the device, where protected
    tokens have inf.
    """

    length: int
    clusters: list[int]
    in_flight: set[int]
    flags: torch.Tensor
    scores: torch.Tensor
    ready: Any


@dataclass
class Offloaded:
    """A request's share of the host tier, and its retrievals.

    heads: flat heads of this rank whose prompt is there, int64 [n], ascending, on the device. slots: int64
    [n, host slots] on the CPU, and where the heads are. row: by flat head, its place in all three. of_layer: by layer,
    where its heads stand in them, and which heads of the layer these are, int64 on the device. base_head: by cluster
    whose pivot this rank holds, the KV head of the rank that made the baseline.
    """

    heads: torch.Tensor
    slots: torch.Tensor
    slots_here: torch.Tensor
    row: dict[int, int]
    of_layer: dict[int, tuple[slice, torch.Tensor]]
    base_head: dict[int, int]
    flights: list[Flight] = field(default_factory=list)
    check: Check | None = None

    @classmethod
    def of(
        cls, heads: list[int], slots: torch.Tensor, kv_heads: int, base_head: dict[int, int], device: torch.device
    ) -> Self:
        """heads: flat and ascending; kv_heads: of a layer."""
        on_device = upload(heads, device)
        layers = [head // kv_heads for head in heads]
        of_layer = {}
        for layer in dict.fromkeys(layers):
            place = slice(layers.index(layer), layers.index(layer) + layers.count(layer))
            of_layer[layer] = (place, on_device[place] - layer * kv_heads)
        return cls(
            on_device, slots, upload(slots, device), {head: i for i, head in enumerate(heads)}, of_layer, base_head
        )

    @property
    def in_flight(self) -> set[int]:
        """Clusters whose satellites wait for tokens."""
        return {cluster for flight in self.flights for cluster in flight.clusters}


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
    policy, plan: as its options make them. row: block ids in this step, int32 [1, n]. unscored: whether a deferred gate
    has not looked at its newest tokens yet.
    """

    slot: int
    prefill_end: int
    prompt_len: int
    policy: Policy
    plan: Plan
    offloaded: Offloaded | None = None
    row: torch.Tensor | None = None
    unscored: bool = False
    selected: Selected | None = None

    @classmethod
    def admit(cls, slot: int, admission: Admission, policy: Policy) -> LiveRequest:
        served = policy.for_request(admission.options)
        return cls(slot, admission.prefill_end, admission.tokens, served, served.plan())

    @property
    def cut_at_end(self) -> bool:
        """Whether every head is cut to a budget of its own when the prompt is complete."""
        return isinstance(self.plan, PagePlan) and self.plan.shrinks

    def judges(self, token: int) -> bool:
        """Whether some cut of the prompt looks at the score of the token at this position."""
        if token >= self.prefill_end or not isinstance(self.plan, SharedPlan):
            return False
        return token < self.plan.cuts_of(self.prefill_end).judged(self.prefill_end)


def upload(numbers: Sequence[int] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """int64 on the device, without waiting for it."""
    values = torch.as_tensor(numbers, dtype=torch.int64)
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)
