"""Budgets over heads, and the choice of tokens within a budget."""

from __future__ import annotations

from math import inf, isnan, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_tools import kept_tokens
from reference import share_out

from vllm_kvplug.components.allocators import even_parts, top_shared, water_fill

WEIGHTS = st.lists(st.one_of(st.floats(0, 4), st.sampled_from([0.0, 0.1, 1.0])), min_size=1, max_size=12)


@pytest.mark.parametrize(
    "total, weights, low, high, expected",
    [
        (10, [1, 1], 0, 10, [5, 5]),
        (10, [3, 1], 0, 10, [8, 2]),  # 7.5 and 2.5: equal remainders, the earlier head gets the token
        (10, [1, 3], 0, 10, [3, 7]),
        (11, [1, 1, 1], 0, 11, [4, 4, 3]),
        (12, [4, 1, 1], 0, 5, [5, 4, 3]),  # what the cap cuts off goes to the others
        (12, [8, 2, 1], 0, 5, [5, 5, 2]),  # and may push the next one over it
        (12, [10, 1, 1], 3, 12, [6, 3, 3]),  # what the floor adds comes from the others
        (30, [10, 1, 1], 4, 20, [20, 5, 5]),
        (10, [0.0, 0.0], 0, 10, [5, 5]),
        (11, [0.0, 0.0, 0.0], 0, 11, [4, 4, 3]),
        (10, [1.0, 0.0], 0, 10, [10, 0]),
        (10, [1.0, 0.0, 0.0], 0, 4, [4, 3, 3]),
        (3, [1, 1], 5, 10, [5, 5]),  # less than the floors
        (99, [1, 9], 0, 10, [10, 10]),  # more than the caps
        (-5, [1, 1], 0, 10, [0, 0]),
        (7, [], 0, 10, []),
        (6, [0.1, 0.1, 0.1], 0, 9, [2, 2, 2]),
    ],
)
def test_water_fill_by_hand(total: int, weights: list[float], low: int, high: int, expected: list[int]):
    assert water_fill(total, weights, low, high) == expected


@settings(deadline=None, max_examples=300)
@given(WEIGHTS, st.integers(0, 20), st.integers(0, 200), st.floats(-0.2, 1.2))
def test_water_fill_properties(weights: list[float], low: int, room: int, fraction: float):
    count, high = len(weights), low + room
    total = int(count * low + fraction * count * room)
    result = water_fill(total, weights, low, high)
    assert sum(result) == min(max(total, count * low), count * high)
    assert all(low <= tokens <= high for tokens in result)
    # More weight, no fewer tokens; for the same weight the earlier head gets the odd token.
    for i in range(count):
        for j in range(count):
            if weights[i] > weights[j]:
                assert result[i] >= result[j]
            if weights[i] == weights[j] and i < j:
                assert result[j] <= result[i] <= result[j] + 1


@settings(deadline=None, max_examples=150)
@given(WEIGHTS, st.integers(0, 8), st.integers(1, 60), st.floats(0, 1))
def test_water_fill_is_proportional_between_the_bounds(weights: list[float], low: int, room: int, fraction: float):
    """Heads strictly inside the bounds get the same tokens per weight, to within the rounding of one token."""
    high = low + room
    result = water_fill(int(len(weights) * (low + fraction * room)), weights, low, high)
    inside = [(w, tokens) for w, tokens in zip(weights, result, strict=True) if low + 1 < tokens < high - 1]
    if any(w <= 0 for w, _ in inside):
        return  # weightless heads share evenly what others cannot take
    if inside:
        least = max((tokens - 1) / w for w, tokens in inside)
        most = min((tokens + 1) / w for w, tokens in inside)
        assert least <= most * (1 + 1e-9)


@settings(deadline=None, max_examples=150)
@given(WEIGHTS, st.integers(0, 20), st.integers(0, 200), st.floats(-0.2, 1.2))
def test_water_fill_is_the_reference(weights: list[float], low: int, room: int, fraction: float):
    """The reference finds the common scale by its bends, this by settling one bound after the other."""
    total = int(len(weights) * (low + fraction * room))
    assert water_fill(total, weights, low, low + room) == share_out(total, weights, low, low + room)


@settings(deadline=None, max_examples=60)
@given(WEIGHTS, st.integers(1, 100))
def test_more_budget_takes_nothing_away(weights: list[float], high: int):
    """A head loses at most the odd token, to rounding, when there is more to share."""
    before = water_fill(0, weights, 0, high)
    for total in range(1, len(weights) * high + 1, max(high // 4, 1)):
        after = water_fill(total, weights, 0, high)
        assert all(b >= a - 1 for a, b in zip(before, after, strict=True))
        before = after


# ----------------------------------------------------------------------------------------------- top_tokens


def test_top_tokens_are_in_order_of_position():
    scores = torch.tensor([[0.1, 0.9, 0.5, 0.7], [4.0, 3.0, 2.0, 1.0]])
    assert kept_tokens(scores, [3, 2]) == [[1, 2, 3], [0, 1]]


def test_ties_go_to_the_earlier_token():
    scores = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0], [7.0] * 5])
    assert kept_tokens(scores, [2, 3]) == [[1, 2], [0, 1, 2]]


def test_infinite_scores_come_first():
    inf = torch.inf
    scores = torch.tensor([[5.0, inf, 6.0, inf, -inf, inf]])
    chosen = [kept_tokens(scores, [count])[0] for count in (2, 3, 4, 6)]
    assert chosen == [[1, 3], [1, 3, 5], [1, 2, 3, 5], [0, 1, 2, 3, 4, 5]]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3), st.integers(1, 40), st.integers(0, 1000), st.data())
def test_top_tokens_against_sorting(heads: int, tokens: int, seed: int, data: st.DataObject):
    values = torch.randint(0, 6, (heads, tokens), generator=torch.Generator().manual_seed(seed)).float()
    counts = data.draw(st.lists(st.integers(1, tokens), min_size=heads, max_size=heads))
    for head, chosen in enumerate(kept_tokens(values, counts)):
        ranked = sorted(range(tokens), key=lambda t: (-values[head, t].item(), t))
        assert chosen == sorted(ranked[: counts[head]])


# ----------------------------------------------------------------------------------------------- top_shared


SCORES = st.sampled_from([-inf, -1.0, 0.0, 1.0, inf, nan])
"""Few values, so that most tie."""


def place_in_order(scores: list[list[float]], place: tuple[int, int]) -> tuple[bool, float, tuple[int, int]]:
    """Of (token, head): NaN comes first, then larger scores, then the earlier token, then the earlier head."""
    score = scores[place[1]][place[0]]
    return not isnan(score), 0.0 if isnan(score) else -score, place


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 9), st.data())
def test_top_shared_against_sorting(groups: int, each: int, tokens: int, data: st.DataObject):
    heads = groups * each
    scores = data.draw(st.lists(st.lists(SCORES, min_size=tokens, max_size=tokens), min_size=heads, max_size=heads))
    counts = [data.draw(st.integers(0, each * tokens + 3)) for _ in range(groups)]  # more than there are: all
    mask = top_shared(torch.tensor(scores).view(heads, tokens), torch.tensor(counts))
    assert mask.shape == (heads, tokens) and mask.dtype == torch.bool
    for group, count in enumerate(counts):
        places = [(t, h) for t in range(tokens) for h in range(group * each, (group + 1) * each)]
        ranked = sorted(places, key=lambda place: place_in_order(scores, place))
        assert {(t, h) for t, h in places if mask[h, t]} == set(ranked[:count])


def test_top_shared_by_hand():
    scores = torch.tensor([[1.0, 3.0, 3.0], [3.0, 0.0, 3.0]])
    chosen = [top_shared(scores, torch.tensor([count])).int().tolist() for count in (0, 1, 2, 3, 4)]
    assert chosen[:3] == [[[0, 0, 0], [0, 0, 0]], [[0, 0, 0], [1, 0, 0]], [[0, 1, 0], [1, 0, 0]]]
    assert chosen[3:] == [[[0, 1, 1], [1, 0, 0]], [[0, 1, 1], [1, 0, 1]]]
    assert top_shared(scores, torch.tensor([0, 1])).int().tolist() == [[0, 0, 0], [1, 0, 0]]


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 9), st.data())
def test_every_head_keeps_its_own_best(groups: int, each: int, tokens: int, data: st.DataObject):
    """From none to all of an even share, which then is every head's. What is not there, -inf, is nobody's own."""
    heads = groups * each
    value = st.sampled_from([-inf, -1.0, 0.0, 1.0])
    scores = data.draw(st.lists(st.lists(value, min_size=tokens, max_size=tokens), min_size=heads, max_size=heads))
    counts = [data.draw(st.integers(0, each * tokens)) for _ in range(groups)]
    own = data.draw(st.sampled_from([0, min(counts) // each // 2, min(counts) // each]))
    mask = top_shared(torch.tensor(scores).view(heads, tokens), torch.tensor(counts), own)
    for group, count in enumerate(counts):
        places = [(t, h) for t in range(tokens) for h in range(group * each, (group + 1) * each)]
        ranked = sorted(places, key=lambda place: place_in_order(scores, place))
        by_head = [[p for p in ranked if p[1] == h and scores[h][p[0]] > -inf] for h in range(heads)]
        first = {place for of_head in by_head for place in of_head[:own]}
        others = [place for place in ranked if place not in first]
        assert {(t, h) for t, h in places if mask[h, t]} == {*first, *others[: count - len(first)]}


def test_own_tokens_by_hand():
    """The first head's scores are higher; the second keeps one or two of its own, the earlier of two that tie."""
    scores = torch.tensor([[5.0, 6.0, 7.0, 8.0], [1.0, 0.0, 1.0, -inf]])
    chosen = [top_shared(scores, torch.tensor([4]), own).int().tolist() for own in (0, 1, 2)]
    assert chosen == [[[1, 1, 1, 1], [0, 0, 0, 0]], [[0, 1, 1, 1], [1, 0, 0, 0]], [[0, 0, 1, 1], [1, 0, 1, 0]]]
    assert top_shared(scores, torch.tensor([2, 3]), 2).sum(1).tolist() == [2, 3]


@given(st.integers(0, 500), st.integers(1, 40))
def test_even_parts(total: int, parts: int):
    found = even_parts(total, parts).tolist()
    assert sum(found) == total and found == sorted(found, reverse=True) and found[0] - found[-1] <= 1
