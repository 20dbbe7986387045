"""Expected Attention's scores against the reference's, and the models it knows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from policy_tools import SHAPE
from reference import Layer
from reference_baselines import ExpectedAttention as Rule

from vllm_kvplug.errors import PolicyError
from vllm_kvplug.policies.base import PromptView
from vllm_kvplug.policies.registry import make_policy

ANGLES = tuple(500 ** (-i / 16) for i in range(16))


@pytest.mark.parametrize("tokens", [1, 4, 5, 30, 200])
@pytest.mark.parametrize("window", [1, 20, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_are_the_references(tokens: int, window: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(tokens)
    queries, keys, values = (torch.randn(n, tokens, 32, generator=generator).to(dtype) for n in (12, 6, 6))
    policy = make_policy("expected_attention", {"window": window}, replace(SHAPE, rotary=ANGLES))
    recent = queries[:, -window:].transpose(0, 1)
    ours = policy.score(PromptView(recent, keys, 0, range(6), 0.2, values))
    layer = Layer(queries, keys, values, torch.ones(6, tokens, dtype=torch.bool), 0.2, torch.empty(0))
    torch.testing.assert_close(ours, Rule(ANGLES, window=window).scores(0, layer), rtol=1e-3, atol=1e-6)
    assert (ours[:, :4] == torch.inf).all()


def test_a_model_whose_positions_are_not_known():
    with pytest.raises(PolicyError, match="does not know how drifting-llama encodes them: choose another --kv-policy"):
        make_policy("expected_attention", {}, SHAPE)
