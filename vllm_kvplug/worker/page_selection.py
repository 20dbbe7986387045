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
from vllm_kvplug.worker.requests import LiveRequest

MOST = torch.finfo(torch.float32).max
"""Of scores, but for the newest page's."""


class Attended(NamedTuple):
    """Tables of one layer for `ops.decode_attention`, in which row r of the batch is request slot r."""

    directory: torch.Tensor
    chunks: torch.Tensor
    row_slot: torch.Tensor
    lengths: torch.Tensor


class PageSelector:
    """Selection of one rank. bounds: [pages + 1, 2, d], the smallest and largest value in each channel of a page's
    keys, of those that are written; the spare last page takes padding.
    """

    def __init__(self, dense_layers: int, geometry: Geometry, pool: PagePool, tables: PageTables, max_rows: int):
        self.dense_layers, self.geometry, self.pool, self.tables = dense_layers, geometry, pool, tables
        g, device = geometry, tables.lengths.device
        self.bounds = torch.zeros((len(pool.pages) + 1, 2, g.head_dim), dtype=g.dtype, device=device)
        heads = g.kv_heads, g.query_heads, g.head_dim
        self._plan = ops.decode_plan(max_rows, 1, *heads, g.dtype, device)
        self._attended, self._pages = (torch.zeros(max_rows, dtype=torch.int64, device=device) for _ in range(2))
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
        values = torch.tensor([attended, whole], dtype=torch.int64)
        if self.bounds.is_cuda:
            values = values.pin_memory().to(self.bounds.device, non_blocking=True)
        for to, value in zip((self._attended, self._pages), values, strict=True):
            to[:decode_rows] = 0
            to[: len(rows)] = value

    def select(self, row_slot: torch.Tensor, layer: int, query: torch.Tensor) -> Attended | None:
        """What the queries [rows, query heads, d] of decode rows attend to in a layer; None: everything."""
        if layer < self.dense_layers or not self._most_attended:
            return None
        g, rows = self.geometry, len(row_slot)
        width = ceil_div(self._most_attended, CHUNK)
        tile = max(TILE_TOKENS // (self._most * PAGE), 1)
        given = row_slot.long(), query, self._attended[:rows], self._pages[:rows]
        tiles = zip(*(of_rows.split(tile) for of_rows in given), strict=True)
        pages = torch.cat([self._choose(layer, *part) for part in tiles])  # [rows, KV heads, most attended]
        chunks = torch.nn.functional.pad(pages, (0, width * CHUNK - pages.shape[-1])).int().view(-1, CHUNK)
        directory = torch.arange(len(chunks), dtype=torch.int32, device=pages.device).view(rows, g.kv_heads, width)
        # The newest page is the last of those chosen, and the only one that need not be full.
        first = layer * g.kv_heads
        stored = self.tables.lengths[row_slot.long(), first : first + g.kv_heads]
        lengths = stored - ((self._pages[:rows] - self._attended[:rows]) * PAGE).int()[:, None]
        numbers = torch.arange(rows, dtype=torch.int32, device=pages.device)
        return Attended(directory, chunks, torch.where(row_slot < 0, -1, numbers), lengths)

    def _choose(
        self, layer: int, slots: torch.Tensor, query: torch.Tensor, attended: torch.Tensor, count: torch.Tensor
    ) -> torch.Tensor:
        """Ids of the pages that rows attend to, in the order of the head: int64 [rows, KV heads, most attended]."""
        g = self.geometry
        heads = torch.arange(layer * g.kv_heads, (layer + 1) * g.kv_heads, device=query.device)
        index = torch.arange(self._most, device=query.device)
        chunk = self.tables.directory[slots[:, None, None], heads[:, None], index // CHUNK].long()
        ids = self.tables.chunks[chunk, index % CHUNK].long()
        there = (index < count[:, None])[:, None]  # [rows, 1, pages]
        ids = torch.where(there, ids, 0)
        scores = page_scores(query.unflatten(1, (g.kv_heads, -1)), *self.bounds[ids].unbind(-2))
        newest = (index == count[:, None] - 1)[:, None]
        scores = scores.nan_to_num(nan=MOST, posinf=MOST).masked_fill(~there, -torch.inf).masked_fill(newest, torch.inf)
        chosen = best(scores, self._most_attended)
        on = torch.arange(chosen.shape[-1], device=query.device) < attended[:, None, None]
        order = torch.where(on, chosen, self._most).sort(-1).values
        return torch.nn.functional.pad(ids, (0, 1)).gather(-1, order)

    def attend(self, output: torch.Tensor, query: torch.Tensor, attended: Attended, scale: float) -> None:
        """As `ops.decode_attention`, over what was selected."""
        if self._plan is not None:
            self._plan.update(attended.row_slot, attended.lengths)
        where = attended.directory, attended.chunks, attended.row_slot, attended.lengths
        ops.decode_attention(output, query, self.pool.pages, *where, 0, self.geometry.kv_heads, scale, self._plan)
