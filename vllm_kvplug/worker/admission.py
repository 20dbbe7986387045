"""Admission behind a local window: a ring of every head's last tokens, and what a gate let out of it (WG-KV).

A head stores its window first, the token at position p at index p % window, and behind it what was admitted, in order
of position. Prompt chunks are written behind all of that and put in their places when the step is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from vllm_kvplug.components.allocators import even_parts, top_shared
from vllm_kvplug.config import CONFIG_FLAG
from vllm_kvplug.cuts import AdmissionCuts
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.placement.pool import PagePool
from vllm_kvplug.placement.tables import PageTables
from vllm_kvplug.plan import SharedPlan
from vllm_kvplug.policies.base import Gate, LocalWindow
from vllm_kvplug.worker.cuts import Cutter
from vllm_kvplug.worker.page_selection import PageSelector
from vllm_kvplug.worker.recent import RecentQueries
from vllm_kvplug.worker.requests import LiveRequest
from vllm_kvplug.worker.step import PrefillRow

if TYPE_CHECKING:
    from vllm_kvplug.memory import Geometry


SCORED_AT_ONCE = 16
"""Requests whose windows a deferred gate looks at in one go: what they take fits in the workspace."""


class Admitter(Cutter):
    """Promotes ring victims before decode steps, and settles prompt chunks after theirs. No host synchronisation.

    selector: of the pages behind the ring, whose bounds it is told of, if queries select them.
    """

    def __init__(
        self,
        geometry: Geometry,
        pool: PagePool,
        tables: PageTables,
        local: LocalWindow,
        gate: Gate,
        recent: RecentQueries,
        selector: PageSelector | None = None,
    ):
        super().__init__(geometry, pool, tables, recent)
        self.local, self.gate, self.selector = local, gate, selector
        if local.deferred and geometry.page_dtype != geometry.dtype:
            raise PolicyError(f"{CONFIG_FLAG}: defer scores keys as they are stored, not with --kv-cache-dtype fp8")

    def score_rings(self, requests: Sequence[LiveRequest], counts: Sequence[int], lengths: Sequence[int]) -> None:
        """Before a step, with a deferred gate: score what is in the windows of requests that come to the end of one, or
        go on with a prompt. counts: tokens of the step; lengths: of the requests after it.
        """
        if not self.local.deferred:
            return
        due = []
        for request, count, length in zip(requests, counts, lengths, strict=True):
            if request.unscored and (count > 1 or (length - 1) % self.local.tokens == 0):
                due.append(request.slot)
            request.unscored = count == 1
        for first in range(0, len(due), SCORED_AT_ONCE):
            slots = torch.tensor(due[first : first + SCORED_AT_ONCE])
            self._score_rings(slots.to(self.tables.lengths.device, non_blocking=True))

    def _score_rings(self, slots: torch.Tensor) -> None:
        """Give a score to those ring tokens of some requests, int64 [R], that have none yet: NaN."""
        g, tables = self.geometry, self.tables
        index = torch.arange(self.local.tokens, device=slots.device)
        scores, position = tables.scores.view(-1), tables.positions.view(-1)
        for layer in range(g.layers):
            heads = torch.arange(layer * g.kv_heads, (layer + 1) * g.kv_heads, device=slots.device)
            there = (index[:, None] < tables.lengths[slots[:, None, None], heads]).flatten(0, 1)  # [R * window, heads]
            where = tables.locate(slots[:, None, None], heads, index[:, None]).flatten(0, 1)
            where = torch.where(there, where, scores.numel() - 1)  # the last entries are nobody's
            key, _ = self.pool.gather(torch.where(there, where, 0))
            found = self.gate.score(layer, key, position[where[:, 0]].long(), None)
            scores[where] = torch.where(scores[where].isnan(), found, scores[where])

    def promote(self, slots: torch.Tensor, rows: torch.Tensor, position: torch.Tensor) -> None:
        """Before rows of one token, whose positions are `position`: save what each is about to overwrite, if admitted.

        slots int64 [R], -1 for padding; rows int32 [R, blocks]; position int64 [R].
        """
        window, tables = self.local.tokens, self.tables
        victim = torch.where(slots < 0, 0, position % window)
        heads = torch.arange(self.geometry.heads, device=slots.device)
        where = tables.locate(slots.clamp_min(0)[:, None], heads, victim[:, None].expand(-1, len(heads)))
        leaving = (position - window)[:, None]
        there = (leaving >= 0) & (slots >= 0)[:, None]  # elsewhere tables may say anything
        keep = self.local.admits(tables.scores.view(-1)[torch.where(there, where, 0)], leaving) & there
        source, target = tables.promote(slots, rows, victim, keep)
        self.pool.copy_tokens(source.flatten().clamp_min(0), target.flatten().clamp_min(0))
        flat = tables.scores.view(-1)  # its last entries are nobody's
        flat[target] = flat[source]
        if self.selector:
            self.selector.note(target, self.pool.keys(target.clamp_min(0)))

    def finish(self, request: LiveRequest, start: int, end: int) -> None:
        """After a step that computed the tokens [start, end): settle a chunk; at a cut, hold the request to its cap."""
        plan, prompt = request.plan, request.prefill_end
        assert isinstance(plan, SharedPlan) and request.row is not None
        cuts = plan.cuts_of(prompt)
        assert isinstance(cuts, AdmissionCuts)
        if end - start == 1 and cuts.protects(start):  # a chunk of one token, scored like an answer's
            index = torch.full((self.geometry.heads, 1), start % self.local.tokens, device=self.tables.lengths.device)
            self.tables.scores.view(-1)[self._locate(request, index)] = torch.inf
        if end - start == 1 and not cuts.bounded and not self._parts(request, end):
            return
        lengths = self.tables.lengths[request.slot].long()
        if end - start > 1:
            lengths = self._settle(request, start, end, lengths)
        before, after = plan.held(prompt, end)
        cut = cuts.next(end - 1) == end
        if cut and cuts.share < 1:
            lengths = self._limit(request, end, lengths, cuts)
        if cut and cuts.budget is not None:
            lengths = self._evict(request, end, lengths, cuts.budget)
        self._give_back(request, end, lengths, after if cut else before)

    def _parts(self, request: LiveRequest, end: int) -> bool:
        """Whether what was admitted goes elsewhere when the request has come to `end` tokens."""
        return False

    def _give_back(self, request: LiveRequest, end: int, lengths: torch.Tensor, left: int) -> None:
        """Give back all but `left` blocks of a request whose heads now have these lengths."""
        self._pack(request, end, lengths, left)
        if self.selector:
            self.selector.renew(request.slot, end)

    def _settle(self, request: LiveRequest, start: int, end: int, lengths: torch.Tensor) -> torch.Tensor:
        """Put a chunk's tokens in their places: into the ring, behind it if admitted, or nowhere. New lengths."""
        window, device = self.local.tokens, lengths.device
        ring, new_ring = min(start, window), min(end, window)
        behind = lengths[:, None] - (end - start)  # where the chunk begins
        position = torch.arange(start - ring, end, device=device)
        index = torch.where(position < start, position % window, behind + position - start)
        where = self._locate(request, index)
        leaves = position < end - window
        keep = self.local.admits(self.tables.scores.view(-1)[where], position) & leaves
        place = behind - ring + new_ring + keep.cumsum(1) - 1
        target = self._locate(request, torch.where(leaves, place.clamp_min(0), position % window))
        moves = keep | ~leaves
        self._move(torch.where(moves, where, -1), torch.where(moves, target, -1))
        return behind[:, 0] - ring + new_ring + keep.sum(1)

    def _limit(self, request: LiveRequest, end: int, lengths: torch.Tensor, cuts: AdmissionCuts) -> torch.Tensor:
        """Drop the lowest scores of what was admitted until heads together, or each of them, store no more such tokens
        than the cap allows. New lengths.
        """
        ring = min(end, self.local.tokens)
        if end == ring:
            return lengths
        where, there, first = self._behind_ring(request, end, lengths)
        scores = self._scores(where).masked_fill_(first, torch.inf).masked_fill_(~there, -torch.inf)
        most, groups = cuts.capped(end, len(scores)), len(scores) if cuts.allocation == "uniform" else 1
        keep = top_shared(scores, even_parts(most, groups, scores.device)) & there
        return ring + self._compact(where, keep)

    def _evict(self, request: LiveRequest, end: int, lengths: torch.Tensor, budget: int) -> torch.Tensor:
        """Where heads store more than `budget` admitted tokens on average, protected ones aside, all give way by the
        same share, until a tenth of the budget is free: what the newest queries attend to least goes. New lengths.
        """
        ring, heads = min(end, self.local.tokens), self.geometry.heads
        if end - ring <= budget:  # also in the head that stores most
            return lengths
        where, there, _ = self._behind_ring(request, end, lengths)
        safe = there & self._stay(where)
        counts = (there & ~safe).sum(1)
        total = counts.sum()
        fewer = counts * (9 * budget * heads) // (10 * total).clamp_min(1)
        kept = torch.where(total > budget * heads, fewer, counts) + safe.sum(1)
        scores = self._scored_now(request, end, where, there.sum(1))
        scores = scores.masked_fill_(safe, torch.inf).masked_fill_(~there, -torch.inf)
        return ring + self._compact(where, top_shared(scores, kept) & there)

    def _stay(self, stored: torch.Tensor) -> torch.Tensor:
        """Which tokens outside of the window no one may drop: the first ones, and what a request protects."""
        position, scores = self.tables.positions.view(-1)[stored], self.tables.scores.view(-1)[stored]
        return (position < self.local.sinks) | (scores == torch.inf)

    def _behind_ring(
        self, request: LiveRequest, end: int, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What was admitted, in a rectangle [heads, tokens]: token slots, -1 where there is none; whether there is one;
        and whether it is among the first tokens, which stay.
        """
        index = torch.arange(min(end, self.local.tokens), end, device=lengths.device)
        there = index < lengths[:, None]
        where = torch.where(there, self._locate(request, torch.minimum(index, lengths[:, None] - 1)), -1)
        return where, there, self.tables.positions.view(-1)[where] < self.local.sinks


def protected_tokens(
    requests: Sequence[LiveRequest], chunks: Sequence[PrefillRow], place: torch.Tensor
) -> torch.Tensor | None:
    """Which of a batch's tokens their requests protect, bool [tokens]; None if they protect none.

    chunks: of the requests, in their order. place: [tokens, heads], for its size and device.
    """
    if not any(request.policy.options.protect for request in requests):
        return None
    protected = torch.zeros(len(place), dtype=torch.bool, device=place.device)
    for request, chunk in zip(requests, chunks, strict=True):
        of_chunk = protected[chunk.tokens]
        for start, end in request.policy.options.protect:
            of_chunk[max(start - chunk.start, 0) : max(end - chunk.start, 0)] = True
    return protected
