"""The end of a prompt whose gate decides three ways: what the device keeps, what the host does, and what is dropped.

While the prompt comes in, cuts keep what is to survive on either side. At its end every head's lowest-scored survivors,
the same number in each, go to the host. From then on a head stores first the tokens that it selects of those, at the
same places as all others, then what stays, which is ragged, and then what is decoded.

Behind a gate on admission all that was admitted goes there, but for what must stay, and heads have unlike many tokens
on the host: fewer than they are given room for. A head stores its ring, what must stay, the tokens that it selects, and
what is promoted while the request decodes.

A token on the host is known by its number there, among its head's in order of position, and not by its position: so
host slots and landmarks have no gaps. Keys therefore lie there as they are after RoPE, and come back without being
turned. A quantiser that turns whole rows itself, as HIGGS does, errs by as much for either.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_kvplug.components.allocators import top_shared
from vllm_kvplug.memory import Geometry
from vllm_kvplug.placement.pool import PagePool
from vllm_kvplug.placement.tables import PageTables
from vllm_kvplug.policies.base import Gate, LocalWindow
from vllm_kvplug.policies.from_host import FromHost
from vllm_kvplug.rotary import Rotary
from vllm_kvplug.selection import AdmittedPlan, HostedPlan
from vllm_kvplug.tiers.host import HostPool
from vllm_kvplug.tiers.lane import Lane
from vllm_kvplug.worker.admission import Admitter
from vllm_kvplug.worker.cuts import Cutter
from vllm_kvplug.worker.recent import RecentQueries
from vllm_kvplug.worker.requests import LiveRequest
from vllm_kvplug.worker.selection import TokenSelector


class HostedSelector(TokenSelector):
    """Selection from what cuts have left to the host. Page tables have `base` + number for a selected token's position:
    no position is so large.
    """

    def __init__(
        self,
        policy: FromHost,
        geometry: Geometry,
        pool: PagePool,
        tables: PageTables,
        host: HostPool,
        lane: Lane,
        max_rows: int = 0,
    ):
        super().__init__(policy, geometry, pool, tables, host, lane, max_rows)
        self.base = geometry.max_tokens
        self.rotary = Rotary(torch.zeros(geometry.head_dim // 2, device=tables.lengths.device), 1.0)

    def begin(self, request: LiveRequest) -> None:
        """Take host slots for what a request's cuts will leave to the host."""
        plan = request.plan
        layout = plan.layout(request.prefill_end) if isinstance(plan, HostedPlan) else None
        if layout is not None:
            self._reserve(request, layout, layout.landmarks)

    def receive(self, request: LiveRequest, layer: int, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Write a layer's tokens [KV heads, tokens, d] to the host, by their numbers; returns pages of landmarks.

        On the model's stream, not in the lane: the next step reads them, and what is encoded is let go of at once.
        """
        assert request.selected is not None
        heads = self._heads[layer * self.geometry.kv_heads :][: self.geometry.kv_heads]
        own = self.host_slots[request.slot, : len(request.selected.slots)]
        self.host.write(own * self.geometry.heads + heads[:, None], 0, self.host.codec.encode(key, value))
        return self.landmarks.encode(key)

    def landmark_blocks(self, request: LiveRequest) -> torch.Tensor:
        """Those that landmarks will take once pages are packed, int64; before they are."""
        assert request.selected is not None and request.row is not None
        layout, end = request.selected.layout, request.prefill_end
        blocks = self.tables.blocks_of(request.slot, request.row, request.plan.row_entries(end, end))
        return blocks[layout.token_blocks :][: layout.landmark_blocks]

    def ready(
        self,
        request: LiveRequest,
        blocks: torch.Tensor,
        landmarks: Sequence[torch.Tensor],
        hosted: torch.Tensor,
        selected: torch.Tensor,
    ) -> None:
        """Tokens are on the host, and pages are packed: landmarks, by layer as from `receive`, go to `blocks`.

        hosted, selected: int64 [heads], how many tokens of a head are on the host, and how many a query selects of
        these. The newest are selected before any query does.
        """
        assert request.selected is not None
        for heads, pages in zip(self._heads.split(self.geometry.kv_heads), landmarks, strict=True):
            self.pool.bytes[blocks * self.geometry.heads + heads[:, None]] = pages
        layout, index = request.selected.layout, torch.arange(request.selected.layout.selected, device=blocks.device)
        stay, excluded = torch.full_like(hosted, layout.stay), torch.zeros_like(hosted)
        newest = torch.where(index < selected[:, None], (hosted - selected)[:, None] + index, -1)
        self._ready(request, blocks, torch.stack([stay, selected, hosted, excluded], 1), newest)


class HostingCutter(Cutter):
    """Cuts prompts, and when one is complete gives the selector what is not to stay."""

    def __init__(self, geometry: Geometry, pool: PagePool, tables: PageTables, selector: HostedSelector):
        super().__init__(geometry, pool, tables)
        self.selector = selector
        self._heads = torch.arange(geometry.heads, device=tables.lengths.device)

    def cut(self, request: LiveRequest, cut: int) -> None:
        if request.selected is None or cut < request.prefill_end:
            super().cut(request, cut)
            return
        assert isinstance(request.plan, HostedPlan) and request.row is not None
        g, layout, survivors = self.geometry, request.selected.layout, self._judge(request, cut)
        stays = survivors - layout.landmarks
        # Where they will lie is not known before pages are packed, and packing reads what stays.
        landmarks = [self._part(request, layer, stays) for layer in range(g.layers)]
        blocks = self.selector.landmark_blocks(request)
        self._pack(request, cut, stays + layout.selected, layout.token_blocks)
        hosted, selected = (torch.full_like(stays, count) for count in (layout.landmarks, layout.selected))
        self.selector.ready(request, blocks, landmarks, hosted, selected)

    def _part(self, request: LiveRequest, layer: int, stays: torch.Tensor) -> torch.Tensor:
        """Part a layer's survivors; returns pages of landmarks of those on the host, uint8 [KV heads, pages, bytes].

        stays: int64 [heads], how many stay of each head. They come to lie behind the places of what is selected.
        """
        assert request.selected is not None and isinstance(request.plan, HostedPlan)
        layout, kv_heads = request.selected.layout, self.geometry.kv_heads
        heads = self._heads[layer * kv_heads : (layer + 1) * kv_heads, None]
        kept = stays[heads]
        last = kept + layout.landmarks - 1
        index = torch.arange(request.prefill_end, device=kept.device)
        stored = self.tables.locate(request.slot, heads, torch.minimum(index, last))
        best = top_shared(self._ranked(request, stored, index <= last), kept[:, 0])
        leaves = torch.sort(~best & (index <= last), dim=1, descending=True, stable=True).indices
        key, value = self.pool.gather(stored.gather(1, leaves[:, : layout.landmarks]))
        landmarks = self.selector.receive(request, layer, key, value)
        front = torch.sort(best, dim=1, descending=True, stable=True).indices
        target = self.tables.locate(request.slot, heads, torch.minimum(index + layout.selected, last))
        moves = index < kept
        self._move(torch.where(moves, stored.gather(1, front), -1), torch.where(moves, target, -1))
        return landmarks

    def _ranked(self, request: LiveRequest, stored: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        """Scores of stored tokens: those that no cut judges come first, and none that is not there."""
        assert isinstance(request.plan, HostedPlan)
        cuts = request.plan.cuts_of(request.prefill_end)
        position = self.tables.positions.view(-1)[stored]
        safe = position >= cuts.judged(request.prefill_end)
        for start, end in cuts.protect:
            safe |= (position >= start) & (position < end)
        return self._scores(stored).masked_fill_(safe, torch.inf).masked_fill_(~there, -torch.inf)


class HostingAdmitter(Admitter):
    """Admits, and when a prompt is complete gives the selector what was admitted of it and has left the window."""

    def __init__(
        self,
        geometry: Geometry,
        pool: PagePool,
        tables: PageTables,
        local: LocalWindow,
        gate: Gate,
        recent: RecentQueries,
        hosted: HostedSelector,
    ):
        super().__init__(geometry, pool, tables, local, gate, recent)
        self.hosted = hosted

    def _parts(self, request: LiveRequest, end: int) -> bool:
        return request.selected is not None and end == request.prefill_end

    def _give_back(self, request: LiveRequest, end: int, lengths: torch.Tensor, left: int) -> None:
        if not self._parts(request, end):
            super()._give_back(request, end, lengths, left)
            return
        assert request.selected is not None and isinstance(request.plan, AdmittedPlan)
        layout = request.selected.layout
        hosted = lengths - layout.stay
        selected = request.plan.chosen.of_heads(hosted)
        landmarks = [self._part(request, layer, lengths) for layer in range(self.geometry.layers)]
        blocks = self.hosted.landmark_blocks(request)
        self._pack(request, end, layout.stay + selected, layout.token_blocks)
        self.hosted.ready(request, blocks, landmarks, hosted, selected)

    def _part(self, request: LiveRequest, layer: int, lengths: torch.Tensor) -> torch.Tensor:
        """Send a layer's admitted tokens to the host, and what must stay of them to the front of the others; returns
        pages of landmarks, uint8 [KV heads, pages, bytes].

        Heads that have admitted fewer tokens than they have room for fill that up with their last.
        """
        assert request.selected is not None
        layout, kv_heads, device = request.selected.layout, self.geometry.kv_heads, lengths.device
        heads = torch.arange(layer * kv_heads, (layer + 1) * kv_heads, device=device)[:, None]
        index = torch.arange(self.local.tokens, request.prefill_end, device=device)
        there = index < lengths[heads]
        stored = self.tables.locate(request.slot, heads, torch.minimum(index, lengths[heads] - 1))
        stays = self._stay(stored) & there
        order = torch.where(stays, 0, torch.where(there, 1, 2)).sort(dim=1, stable=True).indices
        stay = layout.stay - self.local.tokens
        stored, front = stored.gather(1, order), self.tables.locate(request.slot, heads, index[:stay])
        landmarks = self.hosted.receive(request, layer, *self.pool.gather(stored[:, stay:][:, : layout.landmarks]))
        self._move(stored[:, :stay], front)
        return landmarks
