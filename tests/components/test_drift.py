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
    drifted,
    overlaps,
    pivot_scores,
    ranking,
    released_positions,
    satellite_positions,
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


SCORES = st.lists(st.sampled_from([0.0, 0.5, 0.25, 1.0, torch.inf]), min_size=1, max_size=40)


@settings(deadline=None)
@given(st.lists(SCORES, min_size=1, max_size=3))
def test_ranking_is_by_score_then_by_position(rows: list[list[float]]):
    tokens = min(map(len, rows))
    rows = [row[:tokens] for row in rows]
    expected = [sorted(range(tokens), key=lambda t: (-row[t], t)) for row in rows]
    assert ranking(torch.tensor(rows)).tolist() == expected


def test_many_ties_go_to_the_earlier_token():
    """Enough of them that an unstable sort would mix them up."""
    assert ranking(torch.zeros(2, 5000)).tolist() == [list(range(5000))] * 2


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 5), st.integers(0, 1000), st.data())
def test_overlaps(tokens: int, rows: int, seed: int, data: st.DataObject):
    count = data.draw(st.integers(1, tokens))
    generator = torch.Generator().manual_seed(seed)
    order = torch.stack([torch.randperm(tokens, generator=generator) for _ in range(rows)])
    base = torch.randperm(tokens, generator=generator)
    found = overlaps(order, base, count)
    assert found.dtype == torch.float32 and found.shape == (rows,)
    expected = [len(set(row[:count]) & set(base[:count].tolist())) / count for row in order.tolist()]
    assert found.tolist() == torch.tensor(expected).tolist()
    assert count < tokens or found.tolist() == [1.0] * rows


@pytest.mark.parametrize("count", [1, 3, 82, 94, 110, 1000])
def test_a_share_is_the_nearest_number(count: int):
    """So that a share of exactly the threshold is not below it, on any device."""
    base = torch.arange(2 * count)
    for common in {0, 1, count // 3, count // 2, count - 1, count}:
        order = torch.cat([base[:common], base[count : 2 * count - common]])[None]
        share = overlaps(order, base, count)
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
    tokens = len(scores)
    most = data.draw(st.integers(1, tokens), "largest share")
    count = data.draw(st.integers(1, most), "share")
    protected = data.draw(st.integers(0, count), "protected")
    best = sorted(range(tokens), key=lambda t: (-scores[t], t))
    order = ranking(torch.tensor([scores]))[0]
    assert satellite_positions(order, count).tolist() == sorted(best[:count])
    assert released_positions(order, count, most).tolist() == sorted(best[:most])[:count]
    others = sorted(best[protected:most])[: count - protected]
    assert released_positions(order, count, most, protected).tolist() == sorted(best[:protected] + others)


def test_positions_by_hand():
    order = torch.tensor([7, 2, 9, 0, 5, 1, 3, 4, 6, 8])
    assert satellite_positions(order, 3).tolist() == [2, 7, 9]
    assert released_positions(order, 3, 5).tolist() == [0, 2, 5]  # the best token, 7, is lost
    assert released_positions(order, 3, 5, protected=1).tolist() == [0, 2, 7]
    assert released_positions(order, 3, 3).tolist() == [2, 7, 9]
    assert satellite_positions(order, 10).tolist() == released_positions(order, 10, 10).tolist() == list(range(10))
