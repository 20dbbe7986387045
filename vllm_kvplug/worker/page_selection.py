"""Selection of pages at work: bounds of the keys of every page, and tables of the pages that a query attends to."""

from __future__ import annotations

from collections.abc import Sequence
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
        self._attended = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._most, self._most_attended = 0, 0

    def note(self, place: torch.Tensor, key: torch.Tensor) -> None:
        """Widen the bounds of pages by new keys [tokens, KV heads, d] at token slots [tokens, KV heads] (-1: none)."""
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
            return
        self._attended[:decode_rows] = 0
        self._attended[: len(rows)] = upload(attended, self.bounds.device)

    def select(self, row_slot: torch.Tensor, layer: int, query: torch.Tensor) -> Attended | None:
        """What the queries [rows, query heads, d] of decode rows attend to in a layer; None: everything."""
        if layer < self.dense_layers or not self._most_attended:
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
        numbers = torch.arange(rows, dtype=torch.int32, device=pages.device)
        return Attended(directory, chunks, torch.where(row_slot < 0, -1, numbers), lengths)

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
