"""Cuts of a request whose gate says anything at all."""

from __future__ import annotations

from fractions import Fraction
from math import inf, nan

import pytest
import torch
from cut_tools import Request
from policy_tools import SHAPE

from vllm_kvplug.memory import Geometry
from vllm_kvplug.plan import Cuts, DecodeCuts

GEOMETRY = Geometry.of_rank(SHAPE, 0, torch.float32, max_requests=1, max_tokens=128)
HEADS = GEOMETRY.heads


@pytest.mark.parametrize("score", [nan, -inf, inf, 0.0])
def test_protected_tokens_stay_whatever_the_gate_says(score: float):
    """Every second head gives all its tokens the same score, others 1: protected ones are of all heads."""
    cuts = Cuts(48, 16, 4, Fraction(1, 4), protect=((0, 3), (14, 33)))
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
    assert odd < 0 if score == inf else odd > 0  # NaN is the worst score, not the best


@pytest.mark.parametrize("score", [nan, -inf, inf, 0.0])
def test_cuts_of_answers_keep_tokens_that_are_there(score: float):
    """Heads of unlike lengths, so that the rectangle has gaps; after the first cut one loses its sinks' neighbours."""
    cuts = Cuts(16, 16, 1, Fraction(1, 3), DecodeCuts(32, 20, 2, 8))
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
