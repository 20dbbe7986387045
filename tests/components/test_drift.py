"""Attention drift against naive loops."""

from __future__ import annotations

import math
from fractions import Fraction
from statistics import median

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvplug.components.drift import (
    best,
    drifted,
    overlaps,
    pivot_scores,
    positions_of,
    ranks,
    released_choice,
)


def naive_scores(queries: torch.Tensor, keys: torch.Tensor, scale: float, kernel: int) -> list[list[float]]:
    """[n][T], one dot product at a time: softmax, then the pool, then the strongest of the group."""
    result = []
    for group in queries.tolist():
        pooled = []
        for query in group:
            logits = [scale * sum(a * b for a, b in zip(query, key, strict=True)) for key in keys.tolist()]
            weights = [math.exp(x - max(logits)) for x in logits]
            share = [w / sum(weights) for w in weights]
            half = kernel // 2
            pooled.append([sum(share[max(t - half, 0) : t + half + 1]) / kernel for t in range(len(share))])
        result.append([max(column) for column in zip(*pooled, strict=True)])
    return result


@pytest.mark.parametrize("count, group", [(1, 1), (5, 1), (1, 3), (3, 2)])
@pytest.mark.parametrize("tokens, kernel", [(1, 1), (1, 5), (4, 5), (12, 1), (12, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pivot_scores(count: int, group: int, tokens: int, kernel: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(100 * tokens + group)
    queries = (2 * torch.randn(count, group, 7, generator=generator)).to(dtype)
    keys = torch.randn(tokens, 7, generator=generator).to(dtype)
    found = pivot_scores(queries, keys, 0.6, kernel)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor(naive_scores(queries, keys, 0.6, kernel)), atol=1e-6, rtol=1e-5)


def test_attention_is_to_the_prompt_alone():
    """A pivot's query lies after all of the prompt: nothing is masked, and one token gets everything."""
    torch.testing.assert_close(pivot_scores(torch.randn(3, 2, 4), torch.randn(1, 4), 1.0, 1), torch.ones(3, 1))
    found = pivot_scores(torch.zeros(1, 1, 4), torch.randn(8, 4), 1.0, 1)
    torch.testing.assert_close(found, torch.full((1, 8), 1 / 8))


def test_pivots_together_are_as_alone():
    generator = torch.Generator().manual_seed(0)
    queries, keys = torch.randn(4, 3, 2, 8, generator=generator), torch.randn(4, 20, 8, generator=generator)
    found = pivot_scores(queries, keys, 0.5, 5)
    assert found.shape == (4, 3, 20)
    for i in range(4):
        torch.testing.assert_close(found[i], pivot_scores(queries[i], keys[i], 0.5, 5))


def test_scores_are_never_nan():
    """A ranking has a place for every token, whatever keys hold."""
    keys = torch.randn(6, 4)
    keys[2, 1] = torch.nan
    assert not pivot_scores(torch.randn(2, 1, 4), keys, 1.0, 5).isnan().any()


SCORES = st.lists(st.sampled_from([0.0, 0.5, 0.25, 1.0, torch.inf]), min_size=1, max_size=40)


def by_rank(row: list[float]) -> list[int]:
    return sorted(range(len(row)), key=lambda t: (-row[t], t))


def positions(mask: torch.Tensor) -> list[int]:
    return mask.nonzero().flatten().tolist()


@settings(deadline=None)
@given(st.lists(SCORES, min_size=1, max_size=3), st.data())
def test_choices_are_by_score_then_by_position(rows: list[list[float]], data: st.DataObject):
    tokens = min(map(len, rows))
    count = data.draw(st.integers(1, tokens))
    rows = [row[:tokens] for row in rows]
    rank, chosen = ranks(torch.tensor(rows)), best(torch.tensor(rows), count)
    for row, places, mask in zip(rows, rank.tolist(), chosen, strict=True):
        assert [places.index(i) for i in range(tokens)] == by_rank(row)
        assert positions(mask) == sorted(by_rank(row)[:count])


def test_many_ties_go_to_the_earlier_token():
    """Enough of them that an unstable sort would mix them up."""
    assert ranks(torch.zeros(2, 5000)).tolist() == [list(range(5000))] * 2
    assert positions(best(torch.zeros(5000), 2000)) == list(range(2000))


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 5), st.integers(0, 1000), st.data())
def test_overlaps(tokens: int, rows: int, seed: int, data: st.DataObject):
    count = data.draw(st.integers(1, tokens))
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.stack([torch.randperm(tokens, generator=generator) < count for _ in range(rows)])
    base = torch.randperm(tokens, generator=generator) < count
    found = overlaps(chosen, base, count)
    assert found.dtype == torch.float32 and found.shape == (rows,)
    expected = [len(set(positions(row)) & set(positions(base))) / count for row in chosen]
    assert found.tolist() == torch.tensor(expected).tolist()
    assert count < tokens or found.tolist() == [1.0] * rows


@pytest.mark.parametrize("count", [1, 3, 82, 94, 110, 1000])
def test_a_share_is_the_nearest_number(count: int):
    """So that a share of exactly the threshold is not below it, on any device."""
    token = torch.arange(2 * count)
    for common in {0, 1, count // 3, count // 2, count - 1, count}:
        chosen = (token < common) | ((token >= count) & (token < 2 * count - common))
        share = overlaps(chosen[None], token < count, count)
        assert share.item() == torch.tensor(float(Fraction(common, count))).item()
        assert not drifted(share, common / count)
        assert common == 0 or not drifted(share, common / count - 1e-3)
        assert drifted(share, common / count + 1e-3)


@settings(deadline=None)
@given(st.lists(st.integers(0, 10), min_size=1, max_size=9).filter(lambda s: len(s) % 2), st.integers(0, 10))
def test_drift_is_a_median_below_the_threshold(tenths: list[int], threshold: int):
    found = drifted(torch.tensor(tenths) / 10, threshold / 10)
    assert found.dtype == torch.bool and found.shape == ()
    assert found.item() == (median(tenths) < threshold)


# -------------------------------------------------------------------------------------- what satellites get


@settings(deadline=None)
@given(SCORES, st.data())
def test_positions_of_satellites(scores: list[float], data: st.DataObject):
    """Two satellites of one pivot, the second with the largest share."""
    tokens = len(scores)
    most = data.draw(st.integers(1, tokens), "largest share")
    count = data.draw(st.integers(1, most), "share")
    protected = data.draw(st.integers(0, count), "protected")
    order, rank = by_rank(scores), ranks(torch.tensor([scores, scores]))
    counts, mosts = torch.tensor([[count], [most]]), torch.tensor([[most], [most]])

    def found(mask: torch.Tensor) -> list[int]:
        return positions_of(mask, counts[:, 0], count + most).tolist()

    assert found(rank < counts) == sorted(order[:count]) + sorted(order[:most])
    assert found(released_choice(rank, counts, mosts)) == sorted(order[:most])[:count] + sorted(order[:most])
    others = sorted(order[protected:most])[: count - protected]
    kept = found(released_choice(rank, counts, mosts, protected))
    assert kept == sorted(order[:protected] + others) + sorted(order[:most])


def test_positions_by_hand():
    order = [7, 2, 9, 0, 5, 1, 3, 4, 6, 8]
    rank = torch.tensor([[order.index(t) for t in range(10)]])

    def released(count: int, most: int, protected: int = 0) -> list[int]:
        return positions(released_choice(rank, torch.tensor([[count]]), torch.tensor([[most]]), protected)[0])

    assert positions_of(rank < 3, torch.tensor([3]), 3).tolist() == [2, 7, 9]
    assert released(3, 5) == [0, 2, 5]  # the best token, 7, is lost
    assert released(3, 5, protected=1) == [0, 2, 7]
    assert released(3, 3) == [2, 7, 9]
    assert released(10, 10) == list(range(10))
