"""The synthetic policy keeps what it is told to, exactly, and unevenly."""

from __future__ import annotations

import pytest
import torch

from vllm_kvplug.errors import PolicyError
from vllm_kvplug.options import OptionError, RequestOptions
from vllm_kvplug.policies.base import PromptView
from vllm_kvplug.policies.synthetic import Synthetic, SyntheticConfig
from vllm_kvplug.shape import ModelShape

SHAPE = ModelShape(layers=8, kv_heads=4, query_heads=16, head_dim=64)


def policy(**knobs: float) -> Synthetic:
    return Synthetic(SyntheticConfig(**knobs), SHAPE)


@pytest.mark.parametrize("ratio, full_heads", [(0.2, 0.1), (0.5, 0.0), (1.0, 0.3), (0.3, 0.25)])
@pytest.mark.parametrize("tokens", [1, 17, 1000, 131_072])
def test_the_share_is_exact(ratio: float, full_heads: float, tokens: int):
    kept = policy(ratio=ratio, full_heads=full_heads).kept(tokens)
    flat = [count for layer in kept for count in layer]
    assert len(kept) == 8 and len(flat) == 32 and 1 <= min(flat) and max(flat) <= tokens
    if tokens >= 1000:
        assert sum(flat) == int(32 * tokens * ratio + 1e-6)
        assert flat.count(tokens) >= int(32 * full_heads)


def test_most_heads_keep_little():
    flat = sorted(count for layer in policy().kept(100_000) for count in layer)
    assert flat[16] < 12_000 and flat[-3] == 100_000
    assert flat[28] > 5 * flat[0]


def test_seeds_differ_and_repeat():
    assert policy(seed=1).kept(500) == policy(seed=1).kept(500) != policy(seed=2).kept(500)


def test_a_budget_below_the_full_heads():
    with pytest.raises(PolicyError, match="full_heads=0.4 alone keep more than ratio=0.2"):
        policy(full_heads=0.4)
    with pytest.raises(OptionError, match="kvplug.budget 0.05"):
        policy().for_request(RequestOptions(budget=0.05))


def test_scores_are_the_same_on_every_rank():
    keys = torch.zeros(4, 300, 64)
    whole = policy().score(PromptView(torch.zeros(0, 16, 64), keys, 3, range(4), 1.0, keys))
    half = policy().score(PromptView(torch.zeros(0, 8, 64), keys[2:], 3, range(2, 4), 1.0, keys[2:]))
    assert torch.equal(whole[2:], half) and whole.dtype == torch.float32
    assert len(whole.unique()) > 1000  # few ties
