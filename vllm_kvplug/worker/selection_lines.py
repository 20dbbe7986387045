"""Selection from the host on CUDA: as `TokenSelector` does it on the CPU, in launches that a graph can hold.

No shape depends on a step, nothing is read back, and tensors stay where they are. What rows have of unlike length lies
in lines (kernels/lines.py), since all requests together have no more pages of landmarks, and no more of selected tokens
in a head, than the pool has blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from vllm_kvplug.components.landmarks import LandmarkPages
from vllm_kvplug.memory import Geometry
from vllm_kvplug.placement.pool import PagePool
from vllm_kvplug.placement.tables import PageTables
from vllm_kvplug.plan import ceil_div
from vllm_kvplug.quant.grids import load_grid
from vllm_kvplug.selection import Layout
from vllm_kvplug.shape import PAGE
from vllm_kvplug.worker.requests import upload


class SelectedLines:
    """Room for one layer's selection, which all layers share, and what the rows of a step select from.

    _numbers: int32 [4, layers, rows, KV heads], tokens that stay, selected tokens, landmarks, and excluded ones, 0
    where nothing is selected; there are as many rows as let every layer's begin at a multiple of 16 bytes, since
    kernels are compiled for that. _starts: int32 [2, rows + 1], where a row's pages of landmarks begin, and of selected
    tokens. fetches: int64 [3, n], row on the host, position and token slot of what must be fetched, of which there are
    `count`, int32 [1].
    """

    def __init__(
        self,
        name: str,
        landmarks: LandmarkPages,
        geometry: Geometry,
        pool: PagePool,
        tables: PageTables,
        max_rows: int,
    ):
        """name: of the format of `landmarks`."""
        from vllm_kvplug.kernels.landmark_scores import words_of
        from vllm_kvplug.kernels.top_tokens import PROGRAMS, TopTokens

        self.name, self.landmarks, self.geometry, self.pool, self.tables = name, landmarks, geometry, pool, tables
        self.max_rows = max_rows
        g, device, blocks = geometry, tables.lengths.device, len(pool.pages) // geometry.heads
        self.group, self.longest = g.query_heads // g.kv_heads, g.max_tokens
        scored = landmarks.tokens * g.kv_heads * min(max_rows * ceil_div(self.longest, landmarks.tokens), blocks)
        listed = PAGE * g.kv_heads * min(max_rows * ceil_div(self.longest, PAGE), blocks)
        numbers = 4, g.layers, ceil_div(max_rows, 4) * 4, g.kv_heads
        self._numbers = torch.zeros(numbers, dtype=torch.int32, device=device)
        self._starts = torch.zeros((2, max_rows + 1), dtype=torch.int32, device=device)
        self._scores = torch.zeros(scored * self.group, device=device)
        self._weights = torch.zeros(scored, device=device)
        self._turned = torch.zeros((max_rows, g.query_heads, g.head_dim), device=device)
        self._sums = torch.zeros(max(max_rows * g.kv_heads, PROGRAMS) * self.group * 2, device=device)
        self._chosen, self._fresh = torch.zeros((2, listed), dtype=torch.int32, device=device)
        self.fetches = torch.zeros((3, listed), dtype=torch.int64, device=device)
        self.count = torch.zeros(1, dtype=torch.int32, device=device)
        self._top = TopTokens(max_rows, g.kv_heads, self.longest, device)
        coarse, fine = load_grid(4, device), load_grid(1 if name == "residual" else 2, device)
        self._grids = words_of(coarse), words_of(fine)

    def lay_out(self, layouts: Sequence[Layout | None], numbers: torch.Tensor) -> None:
        """The rows of a step; those behind `layouts` are padding. numbers: int64 [rows, heads, 4], of each row its
        entry of `TokenSelector.layouts`.
        """
        rows = len(numbers)
        pages = [n.landmark_blocks if n else 0 for n in layouts] + [0] * (rows - len(layouts))
        lists = [ceil_div(n.selected, PAGE) if n else 0 for n in layouts] + [0] * (rows - len(layouts))
        starts = [[*accumulate(of_rows, initial=0)] for of_rows in (pages, lists)]
        self._starts[:, : rows + 1] = upload(torch.tensor(starts), self._starts.device)
        self._numbers[:, :, :rows] = numbers.unflatten(1, (self.geometry.layers, -1)).permute(3, 1, 0, 2)

    def choose(
        self,
        row_slot: torch.Tensor,
        layer: int,
        query: torch.Tensor,
        blocks: torch.Tensor,
        host_slots: torch.Tensor,
        base: int,
    ) -> None:
        """List in `fetches` what the queries [rows, query heads, d] of decode rows want of a layer and its heads do not
        hold, and note in the tables that they do.

        row_slot int32 [rows]; blocks, host_slots and base as in `TokenSelector`.
        """
        from vllm_kvplug.kernels.landmark_scores import landmark_scores, parts_of_scores
        from vllm_kvplug.kernels.token_selection import group_weights, misses

        g, rows, tokens = self.geometry, len(row_slot), self.landmarks.tokens
        stay, selected, landmarks, excluded = self._numbers[:, layer, :rows]
        starts, list_starts = self._starts[:, : rows + 1]
        heads = layer * g.kv_heads, g.kv_heads, g.heads
        parts = parts_of_scores(rows, g.kv_heads, self.longest)
        sums = self._sums[: rows * g.kv_heads * parts * self.group * 2].view(-1, parts, self.group, 2)
        pages = self.pool.bytes, self.name, tokens, self._grids, blocks
        of_rows = row_slot, landmarks, starts, heads, g.scale, self.longest
        landmark_scores(self._scores, sums, query, self._turned[:rows], *pages, *of_rows)
        given = self._scores, sums, landmarks, excluded, starts, row_slot, self.tables, heads, tokens
        group_weights(self._weights, *given, self.longest)
        self._top.choose(self._chosen, list_starts, PAGE, self._weights, starts, tokens, landmarks, selected)
        self.count.zero_()
        lists = (*self.fetches, self.count), self._fresh, self._weights, self._chosen, (landmarks, selected, stay)
        misses(*lists, starts, list_starts, row_slot, host_slots, self.tables, heads, tokens, base)
