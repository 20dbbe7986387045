"""Cutting a request whose heads share one budget: its prompt as it comes in, and its answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_kvplug.components.allocators import even_parts, in_order, top_shared
from vllm_kvplug.cuts import Cuts
from vllm_kvplug.placement.pool import PagePool
from vllm_kvplug.placement.tables import PageTables
from vllm_kvplug.plan import SharedPlan
from vllm_kvplug.policies.base import PromptView
from vllm_kvplug.worker.recent import RecentQueries
from vllm_kvplug.worker.requests import LiveRequest

if TYPE_CHECKING:
    from vllm_kvplug.memory import Geometry

LOWEST = torch.finfo(torch.float32).min


class Cutter:
    """Judges a request's tokens by their scores, and gives pages back. No host synchronisation.

    recent: the queries that score stored tokens, of policies that have them scored anew.
    """

    def __init__(self, geometry: Geometry, pool: PagePool, tables: PageTables, recent: RecentQueries | None = None):
        self.geometry, self.pool, self.tables, self.recent = geometry, pool, tables, recent

    def cut(self, request: LiveRequest, cut: int) -> None:
        """Between steps, when the request has come to `cut` tokens."""
        plan, end = request.plan, request.prefill_end
        assert isinstance(plan, SharedPlan)
        if plan.stored(end, cut) < plan.stored_at(end, cut):
            self._pack(request, cut, self._judge(request, cut), plan.held(end, cut)[1])

    def _judge(self, request: LiveRequest, cut: int) -> torch.Tensor:
        """Move what stays at a cut to the heads' fronts. Returns their new lengths, int64 [heads]."""
        plan, end = request.plan, request.prefill_end
        assert isinstance(plan, SharedPlan)
        lengths, stored = self.tables.lengths[request.slot].long(), plan.stored(end, cut)
        if stored == plan.stored_at(end, cut):
            return lengths
        judge = self._judge_newest if cut <= end else self._judge_all
        return judge(request, plan.cuts_of(end), cut, lengths, stored)

    def _pack(self, request: LiveRequest, cut: int, kept: torch.Tensor, left: int) -> None:
        """Give back all but `left` blocks of a request whose heads have come to their lengths `kept` by a cut."""
        assert isinstance(request.plan, SharedPlan) and request.row is not None
        entries = request.plan.row_entries(request.prefill_end, cut)
        self.pool.copy_pages(*self.tables.shrink(request.slot, request.row, kept, entries, left, cut))

    def _judge_newest(
        self, request: LiveRequest, cuts: Cuts, cut: int, lengths: torch.Tensor, stored: int
    ) -> torch.Tensor:
        """A prompt's cut: what came in since the last one, until `stored` tokens are left. Returns new lengths.

        All heads hold the same tokens at their ends, those that no cut has judged yet. So scores to compare are a
        rectangle, and what earlier cuts kept need not be looked at.
        """
        start, end = cuts.judged(cuts.previous(cut)), cuts.judged(cut)
        before = lengths[:, None] - (cut - start)  # what earlier cuts kept
        tail = self._locate(request, before + torch.arange(cut - start, device=lengths.device))
        scores = self._scores(tail[:, : end - start])
        for first, last in cuts.protect:
            scores[:, max(first - start, 0) : max(last - start, 0)] = torch.inf
        keep = torch.ones_like(tail, dtype=torch.bool)
        keep[:, : end - start] = self._best(scores, cuts, cut, cuts.kept(cut, self.geometry.heads), stored)
        return before[:, 0] + self._compact(tail, keep)

    def _judge_all(
        self, request: LiveRequest, cuts: Cuts, cut: int, lengths: torch.Tensor, stored: int
    ) -> torch.Tensor:
        """A decoding request's cut: everything it stores, down to `stored` tokens. Returns the heads' new lengths."""
        assert cuts.decode is not None
        index = torch.arange(self._most(request, cut), device=lengths.device)
        there = index < lengths[:, None]
        where = torch.where(there, self._locate(request, torch.minimum(index, lengths[:, None] - 1)), -1)
        position = self.tables.positions.view(-1)[where]
        safe = (position < cuts.decode.sinks) | (position >= cut - cuts.decode.recent)
        for first, last in cuts.protect:
            safe |= (position >= first) & (position < last)
        scores = self._scores(where) if request.policy.gated else self._scored_now(request, cut, where)
        scores = scores.masked_fill_(safe, torch.inf).masked_fill_(~there, -torch.inf)
        return self._compact(where, self._best(scores, cuts, cut, stored, stored))

    def _best(self, scores: torch.Tensor, cuts: Cuts, cut: int, kept: int, stored: int) -> torch.Tensor:
        """The `kept` best of what a cut judges, bool [heads, tokens]; `stored` are all that heads have after it.

        Those who share are even in what they store, and not only in what they keep at each cut: what does not divide
        would go to the same heads again and again.
        """
        g = self.geometry
        groups = {"joint": 1, "layer": g.layers, "uniform": g.heads}[cuts.allocation]
        counts = even_parts(stored, groups, scores.device) - even_parts(stored - kept, groups, scores.device)
        return top_shared(scores, counts, cuts.own(cut, kept, g.heads))

    def _locate(self, request: LiveRequest, index: torch.Tensor) -> torch.Tensor:
        heads = torch.arange(self.geometry.heads, device=index.device)
        return self.tables.locate(request.slot, heads[:, None], index)

    def _scores(self, stored: torch.Tensor) -> torch.Tensor:
        """Finite whatever the gate said: nothing ties with what must stay or is not there. NaN is lowest. A copy."""
        return self.tables.scores.view(-1)[stored].nan_to_num_(nan=LOWEST)

    def _scored_now(
        self, request: LiveRequest, cut: int, stored: torch.Tensor, counts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As `_scores`, by the policy and the request's newest queries.

        counts: int64 [heads], how many tokens each head has, the slots behind these being -1. None: no slot is -1.
        """
        assert self.recent is not None
        g, scores = self.geometry, []
        for layer, slots in enumerate(stored.split(g.kv_heads)):
            queries, (keys, values) = self.recent.of(request.slot, layer, cut), self.pool.gather(slots.clamp_min(0))
            of_layer = None if counts is None else counts[layer * g.kv_heads : (layer + 1) * g.kv_heads]
            view = PromptView(queries, keys, layer, g.head_range, g.scale, values, of_layer)
            scores.append(request.policy.score(view).nan_to_num_(nan=LOWEST))
        return torch.cat(scores)

    def _most(self, request: LiveRequest, cut: int) -> int:
        """Most tokens that a head stores at a cut of an answer. Without a gate heads store equally many."""
        assert isinstance(request.plan, SharedPlan)
        even = request.plan.stored_at(request.prefill_end, cut) // self.geometry.heads
        return cut if request.policy.gated else even

    def _compact(self, stored: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """Move the tokens that are kept, bool [heads, tokens], to the front of `stored`, token slots, in their order.

        Slots of -1 are none. Returns how many each head keeps, int64 [heads].
        """
        chosen, kept = in_order(keep)
        self._move(stored.gather(1, chosen), stored)
        return kept

    def _move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy tokens between token slots [heads, tokens], with their positions and scores; -1 to -1 is nothing.

        Heads are those of whole layers: a layer's tokens at a time are read before they are written.
        """
        some = self.geometry.kv_heads
        for here, there in zip(source.split(some), target.split(some), strict=True):
            self.pool.copy_tokens(here.flatten().clamp_min(0), there.flatten().clamp_min(0))
        for of_tokens in self.tables.of_tokens:
            flat = of_tokens.view(-1)  # its last entries are nobody's
            flat[target] = flat[source]
