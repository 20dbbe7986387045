"""Cuts of a request whose gate says anything at all."""

from __future__ import annotations

from fractions import Fraction
from math import inf, nan

import pytest
import torch
from policy_tools import SHAPE

from vllm_kvplug.lifecycle import Admission
from vllm_kvplug.memory import Geometry
from vllm_kvplug.options import RequestOptions
from vllm_kvplug.placement.integrity import kept_positions
from vllm_kvplug.placement.pool import PagePool
from vllm_kvplug.placement.tables import PageTables, TableSizes
from vllm_kvplug.plan import Cuts, DecodeCuts, SharedPlan
from vllm_kvplug.policies.registry import make_policy
from vllm_kvplug.worker.cuts import Cutter
from vllm_kvplug.worker.requests import LiveRequest

GEOMETRY = Geometry.of_rank(SHAPE, 0, torch.float32, max_requests=1, max_tokens=128)
HEADS, UNBOUNDED = GEOMETRY.heads, 1 << 30


class Request:
    """One request in tables of its own; every K and V holds its head and position, every score is given."""

    def __init__(self, cuts: Cuts):
        self.blocks = 20
        self.tables = PageTables(TableSizes(1, HEADS, 128, self.blocks, scored=True), "cpu")
        self.pool = PagePool(torch.zeros(self.blocks * HEADS, 16, 2))
        self.cutter = Cutter(GEOMETRY, self.pool, self.tables)
        policy = make_policy("knorm", {}, SHAPE)
        self.live = LiveRequest.admit(0, Admission(cuts.prefill_end, RequestOptions()), policy)
        self.live.plan = SharedPlan(SHAPE, lambda n: cuts)
        self.live.row = torch.arange(1, self.blocks, dtype=torch.int32)[None]
        self.length = 0

    def come_to(self, length: int, scores: torch.Tensor) -> None:
        """scores [HEADS, new tokens]."""
        place = self.tables.extend(0, self.live.row, self.length, length, 0, UNBOUNDED)
        self.tables.set_scores(place, scores.T)
        position = torch.arange(self.length, length)[:, None].expand_as(place)
        self.pool.put(
            place.flatten(), torch.stack([torch.arange(HEADS).expand_as(place), position], -1).flatten(0, 1).float()
        )
        self.length = length

    def kept(self) -> list[list[int]]:
        """Positions of each head, checked to be those of what lies in its pages."""
        kept = kept_positions(self.tables, 0)
        for head, positions in enumerate(kept):
            where = self.tables.locate(0, head, torch.arange(len(positions)))
            heads, found = self.pool.gather(where)
            assert found.flatten().tolist() == positions and set(heads.flatten().tolist()) <= {head}
        return kept


@pytest.mark.parametrize("score", [nan, -inf, inf, 0.0])
def test_protected_tokens_stay_whatever_the_gate_says(score: float):
    """Every second head gives all its tokens the same score, others 1: protected ones are of all heads."""
    cuts = Cuts(48, 16, 4, Fraction(1, 4), protect=((0, 3), (14, 33)))
    request = Request(cuts)
    for length in (16, 32, 48):
        scores = torch.ones(HEADS, 16)
        scores[::2] = score
        request.come_to(length, scores)
        request.cutter.cut(request.live, length)
        safe = [t for t in (*range(3), *range(14, 33)) if t < length] + list(range(max(length - 4, 33), length))
        kept = request.kept()
        assert all(set(safe) <= set(positions) for positions in kept)
        assert sum(map(len, kept)) == request.live.plan.stored(48, length)
    odd = sum(map(len, kept[1::2])) - sum(map(len, kept[::2]))
    assert odd < 0 if score == inf else odd > 0  # NaN is the worst score, not the best


@pytest.mark.parametrize("score", [nan, -inf, inf, 0.0])
def test_cuts_of_answers_keep_tokens_that_are_there(score: float):
    """Heads of unlike lengths, so that the rectangle has gaps; after the first cut one loses its sinks' neighbours."""
    cuts = Cuts(16, 16, 1, Fraction(1, 3), DecodeCuts(32, 20, 2, 8))
    request = Request(cuts)
    scores = torch.arange(HEADS * 16.0).view(HEADS, 16)
    request.come_to(16, scores)
    request.cutter.cut(request.live, 16)
    for length in (32, 64, 96):
        request.come_to(length, torch.full((HEADS, length - request.length), score))
        request.cutter.cut(request.live, length)
        kept = request.kept()
        assert sum(map(len, kept)) == request.live.plan.stored(16, length)
        assert all(set(range(length - 8, length)) <= set(positions) for positions in kept)
        assert all(positions == sorted(set(positions)) for positions in kept)
