"""Selection of pages at work: bounds of the keys of every page, and tables of the pages that a query attends to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from vllm_kvplug import ops
from vllm_kvplug.components.selection import best, page_scores
from vllm_kvplug.memory import TILE_TOKENS, Geometry
from vllm_kvplug.placement.pool import PagePool
from vllm_kvplug.placement.tables import CHUNK, PageTables
from vllm_kvplug.plan import ceil_div
from vllm_kvplug.shape import PAGE
from vllm_kvplug.worker.requests import LiveRequest, upload

MOST = torch.finfo(torch.float32).max
"""Of scores, but for those of pages that are always attended to."""


class Attended(NamedTuple):
    """Tables of one layer for `ops.decode_attention`, in which row r of the batch is request slot r."""

    directory: torch.Tensor
    chunks: torch.Tensor
    row_slot: torch.Tensor
    lengths: torch.Tensor


class PageSelector:
    """Selection of one rank. bounds: [pages + 1, 2, d], the smallest and largest value in each channel of a page's
    keys, of those that are written; the spare last page takes padding. local_pages: first pages of every head, which
    all queries attend to, whatever their bounds.

    _attended: int32 [rows], how many pages each row of a step attends to at most, 0 in padding rows. It stays where it
    is, for captured graphs.
    """

    def __init__(
        self,
        dense_layers: int,
        geometry: Geometry,
        pool: PagePool,
        tables: PageTables,
        max_rows: int,
        local_pages: int = 0,
    ):
        self.dense_layers, self.local_pages = dense_layers, local_pages
        self.geometry, self.pool, self.tables = geometry, pool, tables
        g, device = geometry, tables.lengths.device
        self.bounds = torch.zeros((len(pool.pages) + 1, 2, g.head_dim), dtype=g.dtype, device=device)
        heads = g.kv_heads, g.query_heads, g.head_dim
        self._plan = ops.decode_plan(max_rows, 1, *heads, g.dtype, device)
        self._attended = torch.zeros(max_rows, dtype=torch.int32, device=device)
        # Behind a local window a head may have more pages than its request's blocks would give every head.
        blocks = max_rows * ceil_div(g.max_tokens, PAGE) if local_pages else len(pool.pages) // g.heads
        self._lines = AttendedLines(g, max_rows, blocks, device) if device.type == "cuda" else None
        self._most, self._most_attended = 0, 0

    def load_kernels(self) -> None:
        """They compile at start-up, on padding rows, for every number of parts that rows are cut into."""
        g, device, most = self.geometry, self.bounds.device, len(self._attended) if self._lines else 0
        for rows in sorted({min(1 << i, most) for i in range(most.bit_length() + 1)} - {0}):
            query = torch.zeros((rows, g.query_heads, g.head_dim), dtype=g.dtype, device=device)
            nobody = torch.full((rows,), -1, dtype=torch.int32, device=device)
            nowhere = torch.full((rows, g.kv_heads), -1, device=device)
            self.note(nowhere, query[:, : g.kv_heads], apart=True)
            self.prepare([], [], rows)
            attended = self.select(nobody, self.dense_layers, query)
            assert attended is not None
            self.attend(torch.empty_like(query), query, attended, g.scale)

    def note(self, place: torch.Tensor, key: torch.Tensor, apart: bool = False) -> None:
        """Widen the bounds of pages by new keys [tokens, KV heads, d] at token slots [tokens, KV heads] (-1: none).

        apart: no two of them are in one page, as in a step of decode rows alone.
        """
        if apart and self._lines is not None:
            from vllm_kvplug.kernels.page_scores import widen

            widen(self.bounds, place, key)
            return
        page = torch.where(place < 0, len(self.bounds) - 1, place // PAGE).flatten()
        begun = torch.where(place.flatten() % PAGE == 0, page, len(self.bounds) - 1)
        keys = key.flatten(0, 1)
        index = page[:, None].expand_as(keys)
        for side, (start, reduce) in enumerate(((torch.inf, "amin"), (-torch.inf, "amax"))):
            bound = self.bounds[:, side]
            bound[begun] = start  # a page's first token is written before, or together with, its others
            bound.scatter_reduce_(0, index, keys, reduce)

    def renew(self, slot: int, longest: int) -> None:
        """Make the bounds of a request's pages anew, where its tokens have moved. longest: no head stores more."""
        g, tables = self.geometry, self.tables
        index = torch.arange(ceil_div(longest, PAGE) * PAGE, device=self.bounds.device)
        for layer in range(g.layers):  # a layer's keys at a time
            heads = torch.arange(layer * g.kv_heads, (layer + 1) * g.kv_heads, device=index.device)[:, None]
            there = index < tables.lengths[slot, heads]
            where = torch.where(there, tables.locate(slot, heads, index), 0)
            page = torch.where(there[:, ::PAGE], where[:, ::PAGE] // PAGE, len(self.bounds) - 1)
            keys, absent = self.pool.keys(where).unflatten(1, (-1, PAGE)), ~there.unflatten(1, (-1, PAGE))[..., None]
            self.bounds[page, 0] = keys.masked_fill_(absent, torch.inf).amin(2)
            self.bounds[page, 1] = keys.masked_fill_(absent, -torch.inf).amax(2)

    def prepare(self, rows: Sequence[LiveRequest], lengths: Sequence[int], decode_rows: int) -> None:
        """The requests of a step's decode rows, and their lengths after it. Prompts attend to everything."""
        whole = [ceil_div(length, PAGE) for length in lengths]
        attended = [
            row.policy.attended_pages(length) if length > row.prompt_len else pages
            for row, length, pages in zip(rows, lengths, whole, strict=True)
        ]
        self._most, self._most_attended = max(whole, default=0), max(attended, default=0)
        if attended == whole:
            self._most_attended = 0
        numbers = torch.zeros(decode_rows, dtype=torch.int64)
        numbers[: len(rows)] = torch.tensor(attended)
        self._attended[:decode_rows] = upload(numbers, self._attended.device)
        if self._lines is not None:
            self._lines.lay_out(attended, whole, decode_rows)

    def select(self, row_slot: torch.Tensor, layer: int, query: torch.Tensor) -> Attended | None:
        """What the queries [rows, query heads, d] of decode rows attend to in a layer; None: everything.

        On CUDA it is part of captured graphs, and never None where a step to come may select.
        """
        if layer < self.dense_layers:
            return None
        if self._lines is not None:
            return self._lines.choose(self, row_slot, layer, query)
        if not self._most_attended:
            return None
        g, rows = self.geometry, len(row_slot)
        width = ceil_div(self._most_attended, CHUNK)
        tile = max(TILE_TOKENS // (self._most * PAGE), 1)
        first = layer * g.kv_heads
        stored = self.tables.lengths[row_slot.long(), first : first + g.kv_heads].long()
        count = (stored + PAGE - 1) // PAGE
        attended = torch.minimum(count, self._attended[:rows, None])  # [rows, KV heads]
        given = row_slot.long(), query, attended, count
        tiles = zip(*(of_rows.split(tile) for of_rows in given), strict=True)
        pages = torch.cat([self._choose(layer, *part) for part in tiles])  # [rows, KV heads, most attended]
        chunks = torch.nn.functional.pad(pages, (0, width * CHUNK - pages.shape[-1])).int().view(-1, CHUNK)
        directory = torch.arange(len(chunks), dtype=torch.int32, device=pages.device).view(rows, g.kv_heads, width)
        # The newest page is the last of those chosen, and the only one that need not be full.
        lengths = (stored - (count - attended) * PAGE).int()
        index = torch.arange(rows, dtype=torch.int32, device=pages.device)
        return Attended(directory, chunks, torch.where(row_slot < 0, -1, index), lengths)

    def _choose(
        self, layer: int, slots: torch.Tensor, query: torch.Tensor, attended: torch.Tensor, count: torch.Tensor
    ) -> torch.Tensor:
        """Ids of the pages that rows attend to, in the order of the head: int64 [rows, KV heads, most attended].

        attended, count: int64 [rows, KV heads], pages that a head attends to, and that it stores.
        """
        g = self.geometry
        heads = torch.arange(layer * g.kv_heads, (layer + 1) * g.kv_heads, device=query.device)
        index = torch.arange(self._most, device=query.device)
        chunk = self.tables.directory[slots[:, None, None], heads[:, None], index // CHUNK].long()
        ids = self.tables.chunks[chunk, index % CHUNK].long()
        there = index < count[..., None]  # [rows, KV heads, pages]
        ids = torch.where(there, ids, 0)
        scores = page_scores(query.unflatten(1, (g.kv_heads, -1)), *self.bounds[ids].unbind(-2))
        always = (index == count[..., None] - 1) | (index < self.local_pages)
        scores = scores.nan_to_num(nan=MOST, posinf=MOST).masked_fill(always, torch.inf).masked_fill(~there, -torch.inf)
        chosen = best(scores, self._most_attended)
        on = torch.arange(chosen.shape[-1], device=query.device) < attended[..., None]
        order = torch.where(on, chosen, self._most).sort(-1).values
        return torch.nn.functional.pad(ids, (0, 1)).gather(-1, order)

    def attend(self, output: torch.Tensor, query: torch.Tensor, attended: Attended, scale: float) -> None:
        """As `ops.decode_attention`, over what was selected."""
        if self._plan is not None:
            self._plan.update(attended.row_slot, attended.lengths)
        where = attended.directory, attended.chunks, attended.row_slot, attended.lengths
        ops.decode_attention(output, query, self.pool.pages, *where, 0, self.geometry.kv_heads, scale, self._plan)


class AttendedLines:
    """Selection of pages on CUDA: no shape depends on a step, nothing is read back, and tensors stay where they are.

    Scores and ids of pages lie in lines (kernels/lines.py), since all requests together have no more pages in a head
    than there are `blocks`; so do the chunks of the tables that are made of them. _starts, _chunk_starts: int32
    [rows + 1], of a row's pages and of its chunks. _row: int32 [rows], its number, -1 for padding. _counts, _lengths:
    int32 [rows, KV heads], pages that a head has, and tokens in those that are attended to.
    """

    def __init__(self, geometry: Geometry, max_rows: int, blocks: int, device: torch.device):
        from vllm_kvplug.kernels.top_tokens import TopTokens

        g, self.longest = geometry, ceil_div(geometry.max_tokens, PAGE)
        self.kv_heads = g.kv_heads
        pages = min(max_rows * self.longest, blocks)
        chunks = pages // CHUNK + max_rows
        self._scores = torch.zeros(pages * g.kv_heads, dtype=torch.float32, device=device)
        self._ids = self._zeros(device, pages * g.kv_heads)
        self._starts, self._chunk_starts = (self._zeros(device, max_rows + 1) for _ in range(2))
        self._row = self._zeros(device, max_rows) - 1
        self._chunks = self._zeros(device, chunks * g.kv_heads, CHUNK)
        self._directory = self._zeros(device, max_rows, g.kv_heads, ceil_div(self.longest, CHUNK))
        self._counts, self._lengths = (self._zeros(device, max_rows, g.kv_heads) for _ in range(2))
        self._top = TopTokens(max_rows, g.kv_heads, self.longest, device)

    @staticmethod
    def _zeros(device: torch.device, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    def lay_out(self, attended: Sequence[int], pages: Sequence[int], rows: int) -> None:
        """Where the rows of a step have what; rows that follow those of requests are padding."""
        device, live = self._row.device, len(pages)
        ends = [*accumulate(pages, initial=0)], [*accumulate((ceil_div(n, CHUNK) for n in attended), initial=0)]
        starts = torch.tensor([[*of, *[of[-1]] * (rows - live)] for of in ends])
        index = torch.arange(rows + 1)
        index[live:] = -1
        numbers = upload(torch.cat([starts, index[None]]), device).int()
        for to, of_rows in zip((self._starts, self._chunk_starts), numbers[:2], strict=True):
            to[: rows + 1] = of_rows
        self._row[:rows] = numbers[2, :rows]
        first, width = numbers[1, :-1, None], numbers[1].diff()[:, None]
        of_heads = first * self.kv_heads + torch.arange(self.kv_heads, device=device) * width
        self._directory[:rows] = of_heads[..., None] + torch.arange(self._directory.shape[2], device=device)

    def choose(self, selector: PageSelector, row_slot: torch.Tensor, layer: int, query: torch.Tensor) -> Attended:
        """As `PageSelector.select`."""
        from vllm_kvplug.kernels.page_scores import page_scores

        rows, tables = len(row_slot), selector.tables
        attended, starts = selector._attended[:rows], self._starts[: rows + 1]
        counts, left = self._counts[:rows], self._lengths[:rows]
        where = selector.bounds, tables.directory, tables.chunks, row_slot, tables.lengths
        first = layer * self.kv_heads
        of_heads = self._scores, self._ids, counts, left
        page_scores(*of_heads, query, *where, attended, starts, first, selector.local_pages, self.longest)
        line = self._scores, starts, 1, counts, attended[:, None].expand(-1, self.kv_heads), self._ids
        self._top.choose(self._chunks.view(-1), self._chunk_starts[: rows + 1], CHUNK, *line)
        return Attended(self._directory[:rows], self._chunks, self._row[:rows], left)
