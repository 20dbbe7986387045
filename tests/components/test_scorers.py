"""Attention scores against naive loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vllm_kvplug.components.scorers import prompt_attention, smooth, stored_votes


def naive_attention(queries: np.ndarray, keys: np.ndarray, scale: float) -> np.ndarray:
    """[KV heads, group, window, tokens], one dot product at a time."""
    window, query_heads, _ = queries.shape
    heads, tokens, _ = keys.shape
    group = query_heads // heads
    result = np.zeros((heads, group, window, tokens))
    for query_head in range(query_heads):
        for row in range(window):
            position = tokens - window + row
            logits = [scale * sum(queries[row, query_head] * keys[query_head // group, t]) for t in range(position + 1)]
            top = max(logits)
            weights = [math.exp(x - top) for x in logits]
            result[query_head // group, query_head % group, row, : position + 1] = np.array(weights) / sum(weights)
    return result


@pytest.mark.parametrize("heads, group", [(1, 1), (1, 4), (3, 1), (2, 3)])
@pytest.mark.parametrize("window, tokens", [(1, 1), (1, 9), (4, 9), (9, 9)])
def test_prompt_attention(heads: int, group: int, window: int, tokens: int):
    generator = torch.Generator().manual_seed(heads * 100 + window)
    queries = torch.randn(window, heads * group, 5, generator=generator)
    keys = torch.randn(heads, tokens, 5, generator=generator)
    found = prompt_attention(queries, keys, 0.7)
    assert found.shape == (heads, group, window, tokens) and found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), naive_attention(queries.numpy(), keys.numpy(), 0.7), atol=1e-6)


def test_prompt_attention_is_causal():
    attention = prompt_attention(torch.randn(4, 2, 8), torch.randn(2, 6, 8), 1.0)
    for row in range(4):
        assert (attention[..., row, 3 + row :] == 0).all()
        assert (attention[..., row, : 3 + row] > 0).all()
    torch.testing.assert_close(attention.sum(-1), torch.ones(2, 1, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_prompt_attention_computes_in_float32(dtype: torch.dtype):
    queries, keys = torch.randn(3, 2, 8).to(dtype), torch.randn(1, 7, 8).to(dtype)
    expected = naive_attention(queries.float().numpy(), keys.float().numpy(), 0.35)
    found = prompt_attention(queries, keys, 0.35)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)


def test_prompt_attention_leaves_its_inputs():
    queries, keys = torch.randn(3, 2, 8), torch.randn(1, 7, 8)
    before = queries.clone(), keys.clone()
    prompt_attention(queries, keys, 1.0)
    assert torch.equal(queries, before[0]) and torch.equal(keys, before[1])


@pytest.mark.parametrize("kernel", [1, 3, 5, 7])
@pytest.mark.parametrize("shape", [(1,), (4,), (30,), (2, 9), (2, 3, 11), (2, 0), (0, 5)], ids=str)
def test_smooth(kernel: int, shape: tuple[int, ...]):
    scores = torch.rand(shape)
    found = smooth(scores, kernel)
    assert found.shape == scores.shape
    for index in np.ndindex(shape[:-1] if scores.numel() else (0,)):
        padded = np.pad(scores[index].double().numpy(), kernel // 2)
        expected = np.convolve(padded, np.ones(kernel) / kernel, mode="valid")
        np.testing.assert_allclose(found[index].numpy(), expected, atol=1e-6)


def test_smooth_divides_by_the_kernel_at_the_edges_too():
    torch.testing.assert_close(smooth(torch.ones(4), 3), torch.tensor([2 / 3, 1.0, 1.0, 2 / 3]))


@pytest.mark.parametrize("kernel", [1, 5])
@pytest.mark.parametrize("counts", [(9, 9), (1, 7), (4, 0)])
def test_stored_votes(counts: tuple[int, int], kernel: int) -> None:
    """Head by head, query by query; what a head does not have is NaN, and a head without any has no votes."""
    generator = torch.Generator().manual_seed(0)
    queries, keys = torch.randn(6, 4, 8, generator=generator), torch.randn(2, 9, 8, generator=generator)
    for head, count in enumerate(counts):
        keys[head, count:] = torch.nan
    votes = stored_votes(queries, keys, torch.tensor(counts), 0.7, kernel)
    assert votes.shape == (2, 9)
    for head, count in enumerate(counts):
        if count == 0:
            continue
        votes_of = torch.zeros(count)
        for query in queries[:, 2 * head : 2 * head + 2]:
            attention = [(0.7 * keys[head, :count] @ one).softmax(0) for one in query]
            votes_of += torch.maximum(*attention) / 6
        pooled = [votes_of[max(i - kernel // 2, 0) : i + kernel // 2 + 1].max() for i in range(count)]
        torch.testing.assert_close(votes[head, :count], torch.stack(pooled))
