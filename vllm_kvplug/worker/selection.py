"""Selection at work: prompts on their way to the host, landmarks in pages, and what every decode query fetches.

A head that selects stores, in this order, the tokens that always stay, its selected ones, and what is decoded. Which
tokens the selected ones are changes from step to step: those that the next query wants too stay where they are, and
the others are overwritten from the host. Then decode attention runs over the head as over any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_kvplug import ops
from vllm_kvplug.components.selection import best, group_attention, replace_misses
from vllm_kvplug.memory import TILE_ROWS, TILE_TOKENS, Geometry
from vllm_kvplug.placement.pool import PagePool
from vllm_kvplug.placement.tables import PageTables
from vllm_kvplug.plan import ceil_div
from vllm_kvplug.policies.from_host import FromHost
from vllm_kvplug.quant.grids import load_grid
from vllm_kvplug.rotary import Rotary
from vllm_kvplug.selection import Layout, SelectionPlan
from vllm_kvplug.tiers.codecs import HIGGS_BITS
from vllm_kvplug.tiers.host import HostPool
from vllm_kvplug.tiers.lane import Lane
from vllm_kvplug.tiers.ledger import HOST_SLOT
from vllm_kvplug.worker.requests import LiveRequest, Selected, upload
from vllm_kvplug.worker.selection_lines import SelectedLines


@dataclass(frozen=True)
class Widths:
    """The most that any row of a step has: landmark pages, selected tokens, excluded tokens. 0 if no row selects."""

    pages: int = 0
    selected: int = 0
    excluded: int = 0


class TokenSelector:
    """Selection of one rank. By request slot, with a spare last entry for padding rows that selects nothing:

    layouts: int64 [slots + 1, heads, 4], tokens that stay, selected tokens, landmarks, excluded ones. blocks: int64
    [slots + 1, n], the blocks of landmarks, page j of head h in place h of block j. host_slots: int64 [slots + 1, n].
    base: page tables have this plus a token's number on the host for its position. Where prompts lie there whole,
    numbers are positions, and it is 0.
    lines: on CUDA, where decode rows select in captured graphs; None on the CPU, where they do in tiles.
    """

    base = 0

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
        """max_rows: of a decode step, padding included; on CUDA alone."""
        self.geometry, self.pool, self.tables = geometry, pool, tables
        self.host, self.lane = host, lane
        self.landmarks = policy.landmark_pages
        device = tables.lengths.device
        self.rotary = Rotary(torch.tensor(policy.shape.rotary, device=device), 1.0)
        rows = geometry.max_requests + 1
        self.layouts = torch.zeros((rows, geometry.heads, 4), dtype=torch.int64, device=device)
        most = ceil_div(geometry.max_tokens, self.landmarks.tokens), ceil_div(geometry.max_tokens, HOST_SLOT)
        self.blocks, self.host_slots = (torch.zeros((rows, n), dtype=torch.int64, device=device) for n in most)
        self._grid = load_grid(HIGGS_BITS, device) if host.codec.name == "higgs4" else None
        self._heads = torch.arange(geometry.heads, device=device)
        self._widths = Widths()
        where = self.landmarks, geometry, pool, tables, max_rows
        self.lines = SelectedLines(policy.landmarks(), *where) if tables.lengths.is_cuda else None

    # ---- beginning and end

    def begin(self, request: LiveRequest) -> None:
        """Take host slots for a request whose prompt will be selected from."""
        plan = request.plan
        layout = plan.layout(request.prefill_end) if isinstance(plan, SelectionPlan) else None
        if layout is not None:
            self._reserve(request, layout, request.prefill_end)

    def _reserve(self, request: LiveRequest, layout: Layout, tokens: int) -> None:
        slots = self.host.allocate(1, ceil_div(tokens, HOST_SLOT))[0]
        request.selected = Selected(layout, slots)
        self.host_slots[request.slot, : len(slots)] = upload(slots, self._heads.device)

    def end(self, request: LiveRequest) -> None:
        """Forget a request. Stores that are still on their way come before those of its slots' next owner."""
        if request.selected is not None:
            self.host.release(request.selected.slots)
            self.layouts[request.slot] = 0
            request.selected = None

    # ---- prompt: stores

    def store(self, request: LiveRequest, layer: int, start: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Send a chunk's K and V [tokens, KV heads, d] of a layer to the host."""
        if request.selected is not None:
            heads = range(layer * self.geometry.kv_heads, (layer + 1) * self.geometry.kv_heads)
            self._store(request, heads, start, key.transpose(0, 1), value.transpose(0, 1))

    def store_token(self, request: LiveRequest, position: int) -> None:
        """As `store`, for a prompt token that came in a decode row: from its pages, all layers."""
        if request.selected is not None:
            where = self.tables.locate(request.slot, self._heads, torch.full_like(self._heads, position))
            key, value = self.pool.gather(where)
            self._store(request, range(self.geometry.heads), position, key[:, None], value[:, None])

    def _store(self, request: LiveRequest, heads: range, start: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """key, value [heads, tokens, d]. Keys go to the host as they were before RoPE."""
        selected = request.selected
        assert selected is not None
        position = torch.arange(start, start + key.shape[1], device=key.device)
        encoded = self.host.codec.encode(self.rotary.unrotate(key, position).to(key.dtype), value)
        own = self.host_slots[request.slot, : len(selected.slots)]
        slots = own * self.geometry.heads + self._heads[heads.start : heads.stop, None]
        selected.stored = self.lane.submit(lambda: self.host.write(slots, start, encoded), slots, encoded)

    # ---- prompt: its end

    def end_prompt(self, request: LiveRequest, layer: int) -> None:
        """One layer of a complete prompt: landmarks, and what stays to the front; after the last, give blocks back."""
        assert request.selected is not None and request.row is not None
        g, layout = self.geometry, request.selected.layout
        heads = self._heads[layer * g.kv_heads : (layer + 1) * g.kv_heads]
        device = heads.device
        everything = torch.arange(request.prefill_end, device=device)
        stored = self.tables.locate(request.slot, heads[:, None], everything)
        landmarks = self.landmarks.encode(self.pool.gather(stored[:, : layout.landmarks])[0])
        stays = torch.cat([everything[start:end] for start, end in layout.stays])
        front = stored[:, : layout.stay]
        self.pool.copy_tokens(stored[:, stays].flatten(), front.flatten())
        self.tables.set_positions(front, stays.expand_as(front))
        # Dense pages lie in row order: those behind the tokens that are kept are this layer's to write.
        blocks = request.row[0, layout.token_blocks :][: layout.landmark_blocks].long()
        self.pool.bytes[blocks * g.heads + heads[:, None]] = landmarks
        if layer == g.layers - 1:
            self._give_back(request, blocks)

    def _give_back(self, request: LiveRequest, blocks: torch.Tensor) -> None:
        assert request.selected is not None and request.row is not None
        layout, length, slot = request.selected.layout, request.prefill_end, request.slot
        kept = torch.full_like(self._heads, layout.kept)
        before = request.plan.held(length, length)[0]
        # All heads keep alike, so that no page has to move.
        self.tables.shrink(slot, request.row, kept, before, layout.token_blocks, layout.kept)
        open_to = torch.ones(layout.landmarks, dtype=torch.bool)
        for start, end in layout.stays:
            open_to[start:end] = False
        assert request.selected.stored is not None
        request.selected.stored.join()
        first = upload(open_to.nonzero()[-layout.selected :, 0], self._heads.device)  # those next to the local window
        numbers = torch.tensor([layout.stay, layout.selected, layout.landmarks, layout.excluded])
        self._ready(request, blocks, upload(numbers, self._heads.device), first)

    def _ready(self, request: LiveRequest, blocks: torch.Tensor, numbers: torch.Tensor, first: torch.Tensor) -> None:
        """From now on the request selects, from what is stored on the host.

        blocks: of its landmarks, int64 on the device. numbers: its entry of `layouts`, int64 [heads, 4], or [4] for all
        heads. first: the tokens that they select before any query does, int64 [heads, selected], or [selected]; -1
        behind those of a head that selects fewer.
        """
        assert request.selected is not None
        layout, slot = request.selected.layout, request.slot
        self.layouts[slot] = numbers
        self.blocks[slot, : len(blocks)] = blocks
        places = torch.arange(layout.stay, layout.kept, device=first.device)
        where = self.tables.locate(slot, self._heads[:, None], places)
        slots, first = torch.full((1,), slot, device=first.device), first.expand_as(where)
        self._fetch(slots, self._heads, first[None], where[None], first[None] >= 0)

    # ---- decode

    def prepare(self, rows: Sequence[LiveRequest | None], decode_rows: int) -> None:
        """The requests of a step's decode rows, None for those that do not select yet; padding rows follow."""
        layouts = [row.selected.layout if row and row.selected else None for row in rows]
        if self.lines is not None:
            slots = [row.slot if row and row.selected else -1 for row in rows] + [-1] * (decode_rows - len(rows))
            self.lines.lay_out(layouts, self.layouts[upload(slots, self._heads.device)])
            return
        there = [layout for layout in layouts if layout is not None]
        pages = max((layout.landmark_blocks for layout in there), default=0)
        selected = max((layout.selected for layout in there), default=0)
        self._widths = Widths(pages, selected, max((layout.excluded for layout in there), default=0))

    def select(self, row_slot: torch.Tensor, layer: int, query: torch.Tensor) -> None:
        """Put in place what the queries [rows, query heads, d] of decode rows want of a layer.

        On CUDA it is part of captured graphs, whether a row of this step selects or not.
        """
        if self.lines is not None:
            self.lines.choose(row_slot, layer, query, self.blocks, self.host_slots, self.base)
            source, position, target = self.lines.fetches
            how = self.rotary.frequencies, self._grid, self.pool.dtype, self.lines.count
            ops.fetch_tokens(self.pool.pages, self.host.rows, source, position, target, *how)
        elif self._widths.pages:
            rows = max(min(TILE_TOKENS // (self._widths.pages * self.landmarks.tokens), TILE_ROWS), 1)
            for slots, queries in zip(row_slot.split(rows), query.split(rows), strict=True):
                self._select(torch.where(slots < 0, len(self.layouts) - 1, slots).long(), layer, queries)

    def load_kernels(self) -> None:
        """They compile at start-up, on padding rows, for every number of parts that rows are cut into."""
        g, device = self.geometry, self._heads.device
        most = self.lines.max_rows if self.lines else 0
        for rows in sorted({min(1 << i, most) for i in range(most.bit_length() + 1)} - {0}):
            self.prepare([], rows)
            nobody = torch.full((rows,), -1, dtype=torch.int32, device=device)
            self.select(nobody, 0, torch.zeros((rows, g.query_heads, g.head_dim), dtype=g.dtype, device=device))

    def _select(self, slots: torch.Tensor, layer: int, query: torch.Tensor) -> None:
        g, width = self.geometry, self._widths
        heads = self._heads[layer * g.kv_heads : (layer + 1) * g.kv_heads]
        of_heads = self.layouts[slots[:, None], heads]  # [rows, KV heads, 4]
        stay, selected, landmarks, excluded = (n[..., None] for n in of_heads.unbind(-1))
        blocks = self.blocks[slots, : width.pages]
        pages = blocks[:, None] * g.heads + heads[:, None]  # [rows, KV heads, pages]
        scores = self.landmarks.score(query.unflatten(1, (g.kv_heads, -1)), self.pool.bytes, pages) * g.scale
        tokens = scores.shape[-1]
        there = torch.arange(tokens, device=query.device) < landmarks  # [rows, KV heads, tokens]
        weights = group_attention(scores, there)
        # What stays anyway, and what is not there, comes behind everything else.
        ranks = torch.where(there, weights, -1.0)
        if width.excluded:
            index = torch.arange(width.excluded, device=query.device).expand(len(slots), 1, -1)
            known = self.tables.positions.view(-1)[self.tables.locate(slots[:, None, None], heads[:1, None], index)]
            column = torch.where(index < excluded, known.long(), tokens)
            ranks = torch.nn.functional.pad(ranks, (0, 1)).scatter(-1, column, -1.0)[..., :tokens]
        wanted = best(ranks, width.selected)

        index = torch.arange(width.selected, device=query.device)
        on = index < selected
        where = self.tables.locate(slots[:, None, None], heads[:, None], stay + index)
        held = self.tables.positions.view(-1)[torch.where(on, where, 0)].long() - self.base
        position, misses = replace_misses(wanted, held, on, tokens)
        self._fetch(slots, heads, position, where, misses)

    def _fetch(
        self,
        slots: torch.Tensor,
        heads: torch.Tensor,
        position: torch.Tensor,
        where: torch.Tensor,
        on: torch.Tensor,
    ) -> None:
        """Bring tokens from the host to token slots `where`, int64 [rows, heads, n] as `position` is, where `on`."""
        position = torch.where(on, position, 0)
        slot = self.host_slots[slots[:, None, None], position // HOST_SLOT]
        row = torch.where(on, (slot * self.geometry.heads + heads[:, None]) * HOST_SLOT + position % HOST_SLOT, -1)
        lists = row.flatten(), position.flatten(), where.flatten()
        how = self.rotary.frequencies, self._grid, self.pool.dtype
        ops.fetch_tokens(self.pool.pages, self.host.rows, *lists, *how)
        self.tables.set_positions(torch.where(on, where, -1), self.base + position)
