"""Cutting a prompt as it comes in, where its heads share one budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_kvplug.components.allocators import top_shared
from vllm_kvplug.placement.pool import PagePool
from vllm_kvplug.placement.tables import PageTables
from vllm_kvplug.plan import SharedPlan
from vllm_kvplug.worker.requests import LiveRequest

if TYPE_CHECKING:
    from vllm_kvplug.memory import Geometry


class Cutter:
    """Judges what has come in since a request's last cut, and gives pages back. No host synchronisation.

    All heads hold the same tokens at their ends: those that no cut has judged yet. So scores to compare are a
    rectangle, and what earlier cuts kept need not be looked at.
    """

    def __init__(self, geometry: Geometry, pool: PagePool, tables: PageTables):
        self.geometry, self.pool, self.tables = geometry, pool, tables

    def cut(self, request: LiveRequest, cut: int) -> None:
        """Between steps, when the request has come to `cut` tokens, of which all heads store the newest."""
        plan = request.plan
        assert isinstance(plan, SharedPlan) and request.row is not None
        cuts = plan.cuts_of(request.prefill_end)
        start, end = cuts.judged(cuts.previous(cut)), cuts.judged(cut)
        device = self.tables.lengths.device
        heads = torch.arange(self.geometry.heads, device=device)
        lengths = self.tables.lengths[request.slot].long()
        before = (lengths - (cut - start))[:, None]  # what earlier cuts kept
        tail = self.tables.locate(request.slot, heads[:, None], before + torch.arange(cut - start, device=device))

        scores = self.tables.scores.view(-1)[tail[:, : end - start]]
        for first, last in cuts.protect:
            scores[:, max(first - start, 0) : max(last - start, 0)] = torch.inf
        keep = torch.ones_like(tail, dtype=torch.bool)
        keep[:, : end - start] = top_shared(scores, cuts.kept(cut, self.geometry.heads))
        kept = keep.sum(1)
        self._compact(tail, keep, kept)
        entries, left = plan.row_entries(request.prefill_end, cut), plan.held(request.prefill_end, cut)[1]
        shrunk = before[:, 0] + kept
        self.pool.copy_pages(*self.tables.shrink(request.slot, request.row, shrunk, entries, left, cut))

    def _compact(self, tail: torch.Tensor, keep: torch.Tensor, kept: torch.Tensor) -> None:
        """Move the tokens that are kept, bool [heads, tokens], to the front of `tail`, int64 token slots, in order."""
        order = torch.sort(keep, dim=1, descending=True, stable=True).indices
        stays = torch.arange(tail.shape[1], device=tail.device) < kept[:, None]
        source = torch.where(stays, tail.gather(1, order), tail)
        for layer in range(self.geometry.layers):  # a layer's tokens at a time: they are read before they are written
            rows = slice(layer * self.geometry.kv_heads, (layer + 1) * self.geometry.kv_heads)
            self.pool.copy_tokens(source[rows].flatten(), tail[rows].flatten())
        for of_tokens in (self.tables.positions, self.tables.scores):
            flat = of_tokens.view(-1)
            flat[tail] = flat[source]
