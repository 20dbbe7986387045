"""Page tables of head pages: where the tokens of every (request, layer, KV head) lie.

Two levels, because any head of a data-dependent policy may own a whole context: a directory of chunks per
(slot, head), and chunks of 64 page ids from one pool. A page id is `block * heads + place`: the pages of a
vLLM block belong to the request that owns the block, and any head of it may use any of them. A request's pages
are numbered by rank, block by block; those in use are always its first ones. So no free list of pages is needed.

Everything is a device tensor and every operation is a fixed number of launches without host
synchronisation, whatever the number of requests and heads. Writes that a mask turns off go to a spare
last row, column or entry ("trash"), which nothing reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_kvplug import ops
from vllm_kvplug.plan import ceil_div
from vllm_kvplug.shape import PAGE

CHUNK = 64
"""Page ids in a chunk of the second level (1,024 tokens of one head)."""


@dataclass(frozen=True)
class TableSizes:
    """How large the tables of an engine are.

    slots: requests that may be live at once. heads: (layer, KV head) pairs of the rank. max_tokens: most
    tokens of a request. blocks: vLLM blocks in the pool. scored: whether every stored token has a score.
    """

    slots: int
    heads: int
    max_tokens: int
    blocks: int
    scored: bool = False

    @property
    def chunks_per_head(self) -> int:
        return ceil_div(ceil_div(self.max_tokens, PAGE), CHUNK)

    @property
    def blocks_per_request(self) -> int:
        """Most blocks of a request; shrinking rounds up twice."""
        return ceil_div(self.max_tokens, PAGE) + 2

    @property
    def chunks(self) -> int:
        """Enough for every page to be listed, with one partly filled chunk per (slot, head)."""
        return self.blocks * self.heads // CHUNK + (self.slots + 1) * self.heads

    def fixed_bytes(self) -> int:
        """Bytes that do not depend on the number of blocks."""
        directory = (self.slots + 1) * self.heads * (self.chunks_per_head + 1)
        per_slot = (self.slots + 1) * (self.heads + self.blocks_per_request + 6)
        partial_chunks = (self.slots + 1) * self.heads * (CHUNK + 1)
        return 4 * (directory + per_slot + partial_chunks)

    def bytes_per_block(self) -> int:
        """Bytes per vLLM block: page ids, chunk ids, and the position (and score) of every stored token."""
        per_token = 8 if self.scored else 4
        return 4 * self.heads + 4 * self.heads // CHUNK + per_token * self.heads * PAGE


class PageTables:
    """The tables of one engine. `slot` is the engine's number for a live request; -1 means no request."""

    def __init__(self, sizes: TableSizes, device: torch.device | str):
        self.sizes = sizes
        slots, heads, chunks = sizes.slots + 1, sizes.heads, sizes.chunks
        self.directory = torch.full((slots, heads, sizes.chunks_per_head + 1), -1, dtype=torch.int32, device=device)
        self.chunks = torch.zeros((chunks + 1, CHUNK), dtype=torch.int32, device=device)
        self.lengths = torch.zeros((slots, heads), dtype=torch.int32, device=device)
        self.positions = torch.full((sizes.blocks * heads + 1, PAGE), -1, dtype=torch.int32, device=device)
        scored = self.positions.shape if sizes.scored else (0, PAGE)
        self.scores = torch.zeros(scored, dtype=torch.float32, device=device)
        self.of_tokens = (self.positions, self.scores) if sizes.scored else (self.positions,)
        self._free_chunks = torch.arange(chunks + 1, dtype=torch.int32, device=device)
        self._num_free = torch.tensor(chunks, device=device)
        # A request's blocks are those that its last shrinking left, and its row's from `first_row` on.
        self._taken = torch.zeros(slots, dtype=torch.int64, device=device)
        self._first_row = torch.zeros(slots, dtype=torch.int64, device=device)
        self._num_left = torch.zeros(slots, dtype=torch.int64, device=device)
        self._left = torch.zeros((slots, sizes.blocks_per_request), dtype=torch.int32, device=device)
        self._shrunk: dict[int, tuple[int, int]] = {}  # by slot: num_left and first_row, as the host knows them

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
        """Page ids of the rank-th pages of each request, [R, most, heads]."""
        block = rank // self.sizes.heads
        left = self._num_left[slots][:, None, None]
        listed = self._left[slots[:, None, None], block.clamp_max(self.sizes.blocks_per_request - 1)].long()
        in_row = (self._first_row[slots][:, None, None] + block - left).clamp(0, rows.shape[1] - 1)
        fresh = rows.long().gather(1, in_row.flatten(1)).view_as(in_row)
        return torch.where(block < left, listed, fresh) * self.sizes.heads + rank % self.sizes.heads

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
        """Places for the prompt tokens at positions [start, end) of one request, behind what each head stores.

        row int32 [1, blocks]. With a ring, in which all heads store the same, tokens that leave the window before
        `end` get -1. Returns token slots int64 [end - start, heads], and lengthens the heads.
        """
        device, count = self.lengths.device, end - start
        held = self.lengths[slot].long()
        longer = (held + count).clamp_max(ring)
        need = (longer + PAGE - 1) // PAGE - (held + PAGE - 1) // PAGE
        index = torch.tensor([slot]).to(device, non_blocking=True)
        self.grow(index, row, need[None], min(ceil_div(count, PAGE) + 1, ceil_div(ring, PAGE)))
        position = torch.arange(start, end, device=device)
        if end <= ring:
            place = held + (position - start)[:, None]
        else:
            turned = sinks + (position - sinks) % max(ring - sinks, 1)
            place = torch.where(position < ring, position, turned)[:, None].expand(-1, self.sizes.heads)
        found = self.locate(index, torch.arange(self.sizes.heads, device=device), place)
        lasting = (position < sinks) | (position >= end - max(ring - sinks, 1))
        found = torch.where(lasting[:, None], found, -1)
        self.lengths[slot] = longer.int()
        self.set_positions(found, position[:, None].expand_as(found))
        return found

    def set_positions(self, token_slots: torch.Tensor, position: torch.Tensor) -> None:
        """Record the sequence position of the tokens at `token_slots` (-1: none)."""
        trash = self.positions.numel() - PAGE
        self.positions.view(-1)[torch.where(token_slots < 0, trash, token_slots)] = position.int()

    def put_positions(self, token_slots: torch.Tensor, position: torch.Tensor) -> None:
        """As `set_positions`, where every token has a real slot of its own: int64 and int32 [n], in one launch."""
        table, values = self.positions.view(-1, 1), position[:, None]
        ops.scatter_rows(table.view(torch.uint8), values.view(torch.uint8), token_slots)

    def set_scores(self, token_slots: torch.Tensor, scores: torch.Tensor | float) -> None:
        """Record the scores, float32 or one for all, of the tokens at `token_slots` (-1: none)."""
        trash = self.scores.numel() - PAGE
        self.scores.view(-1)[torch.where(token_slots < 0, trash, token_slots)] = scores

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

    def shrink(
        self, slot: int, row: torch.Tensor, kept: torch.Tensor, before: int, after: int, longest: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Give back all but the first `after` blocks of a request whose heads now hold `kept` tokens.

        The tokens a head keeps are already its first ones. row int32 [1, blocks], of which the request has `before`
        entries; kept int64 [heads], on the device, whose pages fit in `after` blocks; longest: no head keeps more.
        Pages whose rank stays below the number of pages in use do not move; the others move into what heads have
        left. Returns (source, target) page ids int64 for the caller to copy: the two never overlap, but for pairs of
        page 0, of vLLM's null block, that fill them up to a length known to the host.
        """
        heads, device = self.sizes.heads, self.lengths.device
        live = self.blocks_of(slot, row, before)
        held = (kept + PAGE - 1) // PAGE
        total, room = held.sum(), after * heads
        if device.type == "cpu" and total > room:
            raise RuntimeError(f"page plan too small: {int(total)} pages in use, {room} in {after} blocks")

        entry = torch.arange(ceil_div(longest, PAGE), device=device)
        used = entry < held[:, None]
        chunk = self.directory[slot, :, entry // CHUNK].long()
        page = torch.where(used, self.chunks[chunk, entry % CHUNK].long(), 0)
        place = torch.zeros(self.sizes.blocks, dtype=torch.int64, device=device)
        place[live] = torch.arange(len(live), device=device)
        rank = place[page // heads] * heads + page % heads
        moves = used & (rank >= total)

        # The n-th page that moves takes the n-th hole; index `room` takes what a mask turns off.
        hole = torch.arange(room + 1, device=device) < total
        hole[torch.where(used & ~moves, rank, room)] = False
        holes = torch.zeros(room + 1, dtype=torch.int64, device=device)
        holes[torch.where(hole, hole.cumsum(0) - 1, room)] = torch.arange(room + 1, device=device)
        order = torch.where(moves, moves.flatten().cumsum(0).view_as(moves) - 1, room)
        target = live[holes[order].clamp_max(room - 1) // heads] * heads + holes[order] % heads
        self.chunks[torch.where(moves, chunk, self.sizes.chunks), entry % CHUNK] = target.int()
        trash = self.positions.shape[0] - 1
        for of_tokens in self.of_tokens:
            of_tokens[torch.where(moves, target, trash)] = of_tokens[page]
        pairs = torch.zeros((2, room + 1), dtype=torch.int64, device=device)
        pairs[:, order.flatten()] = torch.stack([page.flatten(), target.flatten()])

        self._left[slot, :after] = live[:after].int()
        self._shrunk[slot] = after, before
        self._num_left[slot], self._first_row[slot], self._taken[slot] = after, before, total
        self.lengths[slot] = kept.int()
        columns = torch.arange(self.sizes.chunks_per_head + 1, device=device)
        self._release(self.directory[slot], columns >= ((held + CHUNK - 1) // CHUNK)[:, None])
        return pairs[0, : min(room, used.numel())], pairs[1, : min(room, used.numel())]

    def blocks_of(self, slot: int, row: torch.Tensor, entries: int) -> torch.Tensor:
        """The blocks of a request by their pages' ranks, int64; row int32 [1, blocks], of which it has `entries`."""
        num_left, first_row = self._shrunk.get(slot, (0, 0))
        return torch.cat([self._left[slot, :num_left], row[0, first_row:entries]]).long()

    def free(self, slots: Sequence[int]) -> None:
        """Forget requests that ended; their pages went back with their blocks."""
        for slot in slots:
            self._release(self.directory[slot], torch.ones_like(self.directory[slot], dtype=torch.bool))
            self._shrunk.pop(slot, None)
        index = torch.tensor(list(slots)).to(self.lengths.device, non_blocking=True)
        self.lengths[index] = 0
        for counter in (self._taken, self._first_row, self._num_left):
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

    def _with_trash(self, slots: torch.Tensor) -> torch.Tensor:
        return torch.where(slots < 0, self.sizes.slots, slots)
