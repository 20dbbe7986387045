"""Cuts of a request whose gate says anything at all."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import inf, nan
from typing import get_args

import pytest
import torch
from cut_tools import Request
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_tools import SHAPE

from vllm_kvplug.cuts import Allocation, Cuts, DecodeCuts
from vllm_kvplug.memory import Geometry
from vllm_kvplug.plan import SharedPlan

GEOMETRY = Geometry.of_rank(SHAPE, 0, torch.float32, max_requests=1, max_tokens=128)
HEADS = GEOMETRY.heads


@pytest.mark.parametrize("allocation", get_args(Allocation))
@pytest.mark.parametrize("score", [nan, -inf, inf, 0.0])
def test_protected_tokens_stay_whatever_the_gate_says(score: float, allocation: Allocation):
    """Every second head gives all its tokens the same score, others 1: protected ones are of all heads."""
    cuts = Cuts(48, 16, 4, Fraction(1, 4), protect=((0, 3), (14, 33)), allocation=allocation)
    request = Request(cuts, GEOMETRY)
    for length in (16, 32, 48):
        scores = torch.ones(HEADS, 16)
        scores[::2] = score
        request.come_to(length, scores)
        request.cut()
        safe = [t for t in (*range(3), *range(14, 33)) if t < length] + list(range(max(length - 4, 33), length))
        kept = request.kept()
        assert all(set(safe) <= set(positions) for positions in kept)
        assert sum(map(len, kept)) == request.live.plan.stored(48, length)
    odd = sum(map(len, kept[1::2])) - sum(map(len, kept[::2]))
    if allocation == "uniform":
        assert abs(odd) <= HEADS // 2
    else:
        assert odd < 0 if score == inf else odd > 0  # NaN is the worst score, not the best


@pytest.mark.parametrize("allocation", get_args(Allocation))
@pytest.mark.parametrize("score", [nan, -inf, inf, 0.0])
def test_cuts_of_answers_keep_tokens_that_are_there(score: float, allocation: Allocation):
    """Heads of unlike lengths, so that the rectangle has gaps; after the first cut one loses its sinks' neighbours."""
    cuts = Cuts(16, 16, 1, Fraction(1, 3), DecodeCuts(32, 20, 2, 8), allocation=allocation)
    request = Request(cuts, GEOMETRY)
    scores = torch.arange(HEADS * 16.0).view(HEADS, 16)
    request.come_to(16, scores)
    request.cut()
    for length in (32, 64, 96):
        request.come_to(length, torch.full((HEADS, length - request.length), score))
        request.cut()
        kept = request.kept()
        assert sum(map(len, kept)) == request.live.plan.stored(16, length)
        assert all(set(range(length - 8, length)) <= set(positions) for positions in kept)
        assert all(positions == sorted(set(positions)) for positions in kept)


@st.composite
def cuts_of_requests(draw: st.DrawFn) -> Cuts:
    """Prompts of up to 70 tokens; answers are cut to budgets that few or all tokens fit in."""
    end, share = draw(st.integers(1, 70)), draw(st.sampled_from([Fraction(n, d) for n, d in ((0, 1), (1, 7), (2, 3))]))
    decode = draw(st.sampled_from([None, DecodeCuts(16, 1, 2, 4), DecodeCuts(32, 24, 2, 8), DecodeCuts(32, 90, 2, 8)]))
    protect = draw(st.sampled_from([(), ((0, 1),), ((0, end),), ((end // 3, end // 2), (end - 1, end))]))
    protect = tuple(one for one in protect if one[0] < one[1])
    every, window = draw(st.sampled_from([16, 17, 40])), draw(st.integers(1, 20))
    return Cuts(end, every, window, share, decode, protect, draw(st.sampled_from(["layer", "uniform"])))


@settings(deadline=None, max_examples=60)
@given(cuts_of_requests(), st.integers(0, 999))
def test_those_who_share_store_the_same(cuts: Cuts, seed: int):
    """After every cut, up to a token that goes to the earlier; and the plan's totals do not depend on who shares."""
    request, scores = Request(cuts, GEOMETRY), torch.rand(HEADS, 128, generator=torch.Generator().manual_seed(seed))
    scores *= torch.arange(1, HEADS + 1)[:, None]  # later heads would keep nearly everything
    plan, joint = request.live.plan, SharedPlan(SHAPE, lambda n: replace(cuts, allocation="joint"))
    assert plan.cuts(cuts.prefill_end, 0, 128) == joint.cuts(cuts.prefill_end, 0, 128)
    for length in plan.cuts(cuts.prefill_end, 0, 128):
        new = range(request.length, length)
        stored = [{*positions, *new} for positions in request.kept()]
        request.come_to(length, scores[:, request.length : length])
        request.cut()
        kept = request.kept()
        groups = SHAPE.layers if cuts.allocation == "layer" else HEADS
        totals = torch.tensor([len(positions) for positions in kept]).view(groups, -1).sum(1).tolist()
        assert totals == sorted(totals, reverse=True) and totals[0] - totals[-1] <= 1
        assert sum(totals) == plan.stored(cuts.prefill_end, length) == joint.stored(cuts.prefill_end, length)
        assert all(before.issuperset(after) for before, after in zip(stored, kept, strict=True))
        if length > cuts.prefill_end:
            own = cuts.own(length, sum(totals), HEADS)
            assert all(len(after) >= min(own, len(before)) for before, after in zip(stored, kept, strict=True))
