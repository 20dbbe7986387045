"""The newest queries of every request, for policies that score what is stored anew at the cuts of an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm_kvplug.memory import Geometry


class RecentQueries:
    """Of every slot the last `window` queries, that of position p at place p % window; nothing if `window` is 0.

    `_kept` [slots + 1, layers, window, query heads, d] is written by decode rows inside the captured graph; its spare
    last slot takes padding rows.
    """

    def __init__(self, geometry: Geometry, window: int, device: torch.device):
        self.window = window
        slots = geometry.max_requests + 1 if window else 0
        shape = (slots, geometry.layers, window, geometry.query_heads, geometry.head_dim)
        self._kept = torch.zeros(shape, dtype=geometry.dtype, device=device)

    def record_decodes(self, row_slot: torch.Tensor, phase: torch.Tensor, layer: int, query: torch.Tensor) -> None:
        """Keep the query of every decode row, [rows, query heads, d], at the rows' places. Safe inside a graph."""
        if self.window:
            self._kept[row_slot, layer, phase] = query

    def record_chunk(self, slot: int, end: int, layer: int, query: torch.Tensor) -> None:
        """As `record_decodes`, for a chunk of one request that ends before position `end`."""
        if self.window:
            newest = query[-self.window :]
            self._kept[slot, layer, self._places(end - len(newest), end)] = newest

    def of(self, slot: int, layer: int, end: int) -> torch.Tensor:
        """The queries before position `end` >= window, oldest first: [window, query heads, d]."""
        return self._kept[slot, layer, self._places(end - self.window, end)]

    def _places(self, start: int, end: int) -> torch.Tensor:
        return torch.arange(start, end, device=self._kept.device) % self.window
