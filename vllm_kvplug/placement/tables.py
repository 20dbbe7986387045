"""Page tables of head pages: where the tokens of every (request, layer, KV head) lie.

Two levels, because any head of a data-dependent policy may own a whole context: a directory of chunks per
(slot, head), and chunks of 64 page ids from one pool. A page id is `block * heads + place`: the pages of a
vLLM block belong to the request that owns the block, and any head of it may use any of them. Pages are
taken in a fixed order from what the request's blocks hold, so no free list of pages is needed.

Everything is a device tensor and every operation is a fixed number of launches without host
synchronisation, whatever the number of requests and heads. Writes that a mask turns off go to a spare
last row, column or entry ("trash"), which nothing reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_kvplug.plan import ceil_div
from vllm_kvplug.shape import PAGE

CHUNK = 64
"""Page ids in a chunk of the second level (1,024 tokens of one head)."""


@dataclass(frozen=True)
class TableSizes:
    """How large the tables of an engine are.

    slots: requests that may be live at once. heads: (layer, KV head) pairs of the rank. max_tokens: most
    tokens of a request. blocks: vLLM blocks in the pool.
    """

    slots: int
    heads: int
    max_tokens: int
    blocks: int

    @property
    def chunks_per_head(self) -> int:
        return ceil_div(ceil_div(self.max_tokens, PAGE), CHUNK)

    @property
    def spares(self) -> int:
        """Pages that a request may have left over after shrinking and still come to need.

        Blocks follow the neediest tensor-parallel rank. Another rank has more left over, but never takes more
        than 2 * heads of it before the blocks that come for new tokens: heads grow by n / 16 pages, rounded
        either way, so ranks differ by at most a page a head, and the neediest had less than a block over.
        """
        return 2 * self.heads

    @property
    def chunks(self) -> int:
        """Enough for every page to be listed, with one partly filled chunk per (slot, head)."""
        return self.blocks * self.heads // CHUNK + (self.slots + 1) * self.heads

    def fixed_bytes(self) -> int:
        """Bytes that do not depend on the number of blocks."""
        directory = (self.slots + 1) * self.heads * (self.chunks_per_head + 1)
        per_slot = (self.slots + 1) * (self.heads + self.spares + 6)
        partial_chunks = (self.slots + 1) * self.heads * (CHUNK + 1)
        return 4 * (directory + per_slot + partial_chunks)

    def bytes_per_block(self) -> int:
        """Bytes per vLLM block: page ids, chunk ids, and the position of every stored token."""
        return 4 * self.heads + 4 * self.heads // CHUNK + 4 * self.heads * PAGE


class PageTables:
    """The tables of one engine. `slot` is the engine's number for a live request; -1 means no request."""

    def __init__(self, sizes: TableSizes, device: torch.device | str):
        self.sizes = sizes
        slots, heads, chunks = sizes.slots + 1, sizes.heads, sizes.chunks
        self.directory = torch.full((slots, heads, sizes.chunks_per_head + 1), -1, dtype=torch.int32, device=device)
        self.chunks = torch.zeros((chunks + 1, CHUNK), dtype=torch.int32, device=device)
        self.lengths = torch.zeros((slots, heads), dtype=torch.int32, device=device)
        self.positions = torch.full((sizes.blocks * heads + 1, PAGE), -1, dtype=torch.int32, device=device)
        self._free_chunks = torch.arange(chunks + 1, dtype=torch.int32, device=device)
        self._num_free = torch.tensor(chunks, device=device)
        # Pages are taken from the spare list first, then from the row's blocks, `first_row` onwards.
        self._taken = torch.zeros(slots, dtype=torch.int64, device=device)
        self._first_row = torch.zeros(slots, dtype=torch.int64, device=device)
        self._spare = torch.zeros((slots, sizes.spares), dtype=torch.int32, device=device)
        self._num_spare = torch.zeros(slots, dtype=torch.int64, device=device)

    # ---- reading

    def locate(self, slots: torch.Tensor | int, heads: torch.Tensor | int, index: torch.Tensor) -> torch.Tensor:
        """Token slots (page * 16 + offset, int64) of the `index`-th stored tokens; broadcasts.

        A number for `slots` or `heads` costs nothing; a tensor made of one would make the host wait for the device.
        Where the table has no such page the result is meaningless: mask it.
        """
        index = index.long()
        chunk = self.directory[slots, heads, index // (PAGE * CHUNK)].long()
        return self.chunks[chunk, index // PAGE % CHUNK].long() * PAGE + index % PAGE

    # ---- growing

    def grow(self, slots: torch.Tensor, rows: torch.Tensor, need: torch.Tensor, most: int) -> None:
        """Give each head of `slots` `need` more pages, page-major over heads.

        slots int64 [R] (-1: none); rows int32 [R, blocks], the block ids of each request; need int64
        [R, heads], at most `most`. `lengths` says how many pages a head has, so call this before
        lengthening. While all heads grow alike, page j of head h is place h of block j.
        """
        if most == 0:
            return
        slots = self._with_trash(slots)
        step = torch.arange(most, device=need.device)
        wanted = step[None, :, None] < need[:, None, :]  # [R, most, heads]
        rank = wanted.flatten(1).cumsum(1).view_as(wanted) - 1 + self._taken[slots][:, None, None]
        pages = self._pages(slots, rows, rank)
        have = (self.lengths[slots].long() + PAGE - 1) // PAGE
        entry = have[:, None, :] + step[None, :, None]
        self._put_entries(slots, entry, pages, wanted)
        self._taken.index_add_(0, slots, need.sum(1))

    def _pages(self, slots: torch.Tensor, rows: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
        """Page ids of the rank-th pages taken by each request, [R, most, heads]."""
        heads = self.sizes.heads
        spare = self._num_spare[slots][:, None, None]
        listed = self._spare[slots[:, None, None], rank.clamp(0, self.sizes.spares - 1)].long()
        fresh = (rank - spare).clamp_min(0)
        row_index = (self._first_row[slots][:, None, None] + fresh // heads).clamp_max(rows.shape[1] - 1)
        block = rows.long().gather(1, row_index.flatten(1)).view_as(row_index)
        return torch.where(rank < spare, listed, block * heads + fresh % heads)

    def _put_entries(self, slots: torch.Tensor, entry: torch.Tensor, pages: torch.Tensor, on: torch.Tensor) -> None:
        """Write page ids at logical pages `entry` where `on`, adding chunks where a head enters a new one."""
        heads = torch.arange(self.sizes.heads, device=entry.device)
        slot = slots[:, None, None]
        opens = on & (entry % CHUNK == 0)
        order = opens.flatten().cumsum(0).view_as(opens)
        fresh = self._free_chunks[(self._num_free - order).clamp_min(0)]
        column = torch.where(opens, entry // CHUNK, self.sizes.chunks_per_head)
        self.directory[slot, heads, column] = fresh
        self._num_free -= opens.sum()
        column = torch.where(on, entry // CHUNK, self.sizes.chunks_per_head)
        chunk = torch.where(on, self.directory[slot, heads, column].long(), self.sizes.chunks)
        self.chunks[chunk, entry % CHUNK] = pages.int()

    def append(
        self,
        slots: torch.Tensor,
        rows: torch.Tensor,
        position: torch.Tensor,
        sinks: int,
        ring: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Places for one new token of every head, one per row: append below `ring` tokens, overwrite after.

        slots int64 [R]; rows int32 [R, blocks]; position int64 [R], of the new token. A head that holds
        `ring` tokens overwrites the oldest of those behind its first `sinks`. Returns token slots int64
        [R, heads], in `out` if that is given, -1 for rows without a request, and lengthens the heads.
        """
        if out is None:
            out = torch.empty((slots.shape[0], self.sizes.heads), dtype=torch.int64, device=slots.device)
        if self.lengths.is_cuda:
            from vllm_kvplug.kernels.append import append

            append(self, out, slots, rows, position, sinks, ring)
        else:
            out.copy_(self._append(slots, rows, position, sinks, ring))
        return out

    def _append(
        self, slots: torch.Tensor, rows: torch.Tensor, position: torch.Tensor, sinks: int, ring: int
    ) -> torch.Tensor:
        """`append` in plain torch: what the kernel is held to."""
        live = slots >= 0
        index = self._with_trash(slots)
        length = self.lengths[index].long()
        growing = (length < ring) & live[:, None]
        self.grow(slots, rows, (growing & (length % PAGE == 0)).long(), 1)
        victim = sinks + (position.long() - sinks) % max(ring - sinks, 1)
        victim = torch.where(live, victim, 0)  # a padding row's position is whatever vLLM left there
        place = torch.where(growing, length, victim[:, None].expand_as(length))
        heads = torch.arange(self.sizes.heads, device=length.device)
        found = self.locate(index[:, None], heads, place)
        found = torch.where(live[:, None], found, -1)
        self.lengths[index] = (length + growing).int()
        self.set_positions(found, position[:, None].expand_as(found))
        return found

    def extend(self, slot: int, row: torch.Tensor, start: int, end: int, sinks: int, ring: int) -> torch.Tensor:
        """Places for the prompt tokens at positions [start, end) of one request, equal in every head.

        row int32 [1, blocks]. With a ring, tokens that leave the window before `end` get -1. Returns
        token slots int64 [end - start, heads], and sets the lengths.
        """
        device = self.lengths.device
        pages = ceil_div(min(end, ring), PAGE) - ceil_div(min(start, ring), PAGE)
        index = torch.tensor([slot]).to(device, non_blocking=True)
        self.grow(index, row, torch.full((1, self.sizes.heads), pages, device=device), pages)
        position = torch.arange(start, end, device=device)
        window = max(ring - sinks, 1)
        place = torch.where(position < ring, position, sinks + (position - sinks) % window)
        heads = torch.arange(self.sizes.heads, device=device)
        found = self.locate(index, heads, place[:, None].expand(-1, self.sizes.heads))
        lasting = (position < sinks) | (position >= end - window)
        found = torch.where(lasting[:, None], found, -1)
        self.lengths[slot] = min(end, ring)
        self.set_positions(found, position[:, None].expand_as(found))
        return found

    def set_positions(self, token_slots: torch.Tensor, position: torch.Tensor) -> None:
        """Record the sequence position of the tokens at `token_slots` (-1: none)."""
        trash = self.positions.numel() - PAGE
        self.positions.view(-1)[torch.where(token_slots < 0, trash, token_slots)] = position.int()

    # ---- promoting, compacting, freeing

    def promote(self, slots: torch.Tensor, rows: torch.Tensor, victim: torch.Tensor, keep: torch.Tensor):
        """Give ring victims a permanent place behind the ring (lazy promotion, WG-KV section 2.3).

        slots int64 [R]; victim int64 [R], the ring index about to be overwritten; keep bool [R, heads],
        the heads whose victim outlives the window. Returns (source, target) token slots int64 [R, heads],
        -1 where nothing moves, for the caller to copy, and lengthens the heads that keep.
        """
        index = self._with_trash(slots)
        keep = keep & (slots >= 0)[:, None]
        length = self.lengths[index].long()
        self.grow(slots, rows, (keep & (length % PAGE == 0)).long(), 1)
        heads = torch.arange(self.sizes.heads, device=length.device)
        source = self.locate(index[:, None], heads, victim[:, None].expand_as(length))
        target = self.locate(index[:, None], heads, length)
        self.lengths[index] = (length + keep).int()
        source, target = torch.where(keep, source, -1), torch.where(keep, target, -1)
        moved = self.positions.view(-1)[source.clamp_min(0)]
        self.set_positions(target, moved)
        return source, target

    def shrink(self, slot: int, kept: Sequence[int], before: int, after: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Give back all but `after` of the `before` blocks of a request whose heads now hold `kept` tokens.

        The tokens a head keeps are already its first ones. Pages in blocks that stay do not move; the
        others move into pages that heads have left. Returns (source, target) page ids int64 for the
        caller to copy (the two never overlap). Pages left over are the next ones the request takes, `spares` at most.
        """
        pages = [ceil_div(tokens, PAGE) for tokens in kept]
        movers = [(h, j) for h, count in enumerate(pages) for j in range(after, count)]
        holes = [(h, j) for h, count in enumerate(pages) for j in range(count, after)]
        if len(holes) < len(movers):
            raise RuntimeError(f"page plan too small: {len(movers)} pages to move, {len(holes)} free in {after} blocks")
        source, target = self._entries(slot, movers), self._entries(slot, holes)
        self.positions[target[: len(movers)]] = self.positions[source]
        device = self.lengths.device
        if movers:
            head, entry = torch.tensor(movers).to(device, non_blocking=True).unbind(1)
            chunk = self.directory[slot, head, entry // CHUNK].long()
            self.chunks[chunk, entry % CHUNK] = target[: len(movers)].int()
        spare = target[len(movers) :][: self.sizes.spares]
        self._spare[slot, : len(spare)] = spare.int()
        self._num_spare[slot] = len(spare)
        self._taken[slot] = 0
        self._first_row[slot] = before
        self.lengths[slot] = torch.tensor(kept, dtype=torch.int32).to(device, non_blocking=True)
        used = (self.lengths[slot].long() + PAGE * CHUNK - 1) // (PAGE * CHUNK)
        columns = torch.arange(self.sizes.chunks_per_head + 1, device=device)
        self._release(self.directory[slot], columns >= used[:, None])
        return source, target[: len(movers)]

    def free(self, slots: Sequence[int]) -> None:
        """Forget requests that ended; their pages went back with their blocks."""
        for slot in slots:
            self._release(self.directory[slot], torch.ones_like(self.directory[slot], dtype=torch.bool))
        index = torch.tensor(list(slots)).to(self.lengths.device, non_blocking=True)
        self.lengths[index] = 0
        for counter in (self._taken, self._first_row, self._num_spare):
            counter[index] = 0

    def _release(self, directory: torch.Tensor, drop: torch.Tensor) -> None:
        """Return the chunks of `directory` ([heads, chunks]) marked by `drop`, and empty those places."""
        last = self.sizes.chunks_per_head
        drop = drop & (directory >= 0)
        drop[:, last] = False
        order = drop.flatten().cumsum(0).view_as(drop) - 1
        place = torch.where(drop, self._num_free + order, self.sizes.chunks)
        self._free_chunks[place] = directory
        self._num_free += drop.sum()
        directory.masked_fill_(drop, -1)

    def _entries(self, slot: int, places: list[tuple[int, int]]) -> torch.Tensor:
        """Page ids at logical (head, page) places, int64."""
        if not places:
            return torch.empty(0, dtype=torch.int64, device=self.lengths.device)
        head, entry = torch.tensor(places).to(self.lengths.device, non_blocking=True).unbind(1)
        return self.chunks[self.directory[slot, head, entry // CHUNK].long(), entry % CHUNK].long()

    def _with_trash(self, slots: torch.Tensor) -> torch.Tensor:
        return torch.where(slots < 0, self.sizes.slots, slots)
