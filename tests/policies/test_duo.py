"""DuoAttention's choice of heads, from gates and from a head profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from policy_tools import SHAPE, kept_tokens, save_profile
from reference_baselines import Duo as Rule

from benchmarks.drift_model import KV_HEADS, LAYERS
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.options import RequestOptions
from vllm_kvplug.policies.base import PromptView
from vllm_kvplug.policies.registry import make_policy

GATES = [[0.9, 0.1, 0.5, 0.5, 0.0, 0.3], [0.5, 0.8, 0.2, 0.7, 0.6, 0.4]]


@pytest.fixture
def gates(tmp_path: Path) -> str:
    path = tmp_path / "full_attention_heads.tsv"
    path.write_text("".join("\t".join(f"{gate:.3f}" for gate in layer) + "\n" for layer in GATES))
    return str(path)


def duo(**knobs: Any) -> Any:
    return make_policy("duo", knobs, SHAPE)


@pytest.mark.parametrize("retrieval", [0.05, 0.25, 0.5, 0.59, 1])
def test_budgets_are_the_references(gates: str, retrieval: float):
    policy = duo(gates=gates, retrieval=retrieval, sinks=4, recent=10)
    rule = Rule(GATES, retrieval=retrieval, sinks=4, recent=10)
    for tokens in (1, 13, 14, 15, 100):
        assert policy.kept(tokens) == rule.budgets(LAYERS, KV_HEADS, tokens)


def test_gates_by_hand(gates: str):
    """6 of 12 heads: gates of 0.9, 0.8, 0.7, 0.6, and the first two of 0.5."""
    assert duo(gates=gates).kept(1000) == [[1000, 384, 1000, 1000, 384, 384], [384, 1000, 384, 1000, 1000, 384]]


def test_heads_of_a_profile(tmp_path: Path):
    """First the four that it keeps whole, then those of the largest weights, 1.5 and 1.4."""
    path = str(save_profile(tmp_path))
    assert duo(profile=path, sinks=1, recent=2).kept(9) == [[3, 9, 9, 3, 9, 3], [3, 9, 9, 3, 3, 9]]


def test_streaming_heads_keep_both_ends(gates: str):
    keys = torch.zeros(6, 20, 32)
    view = PromptView(torch.empty(0, 12, 32), keys, 0, range(6), 1.0, keys)
    scores = duo(gates=gates, sinks=3, recent=4).score(view)
    assert kept_tokens(scores, [7] * 6) == [[0, 1, 2, 16, 17, 18, 19]] * 6


def test_a_requests_budget_is_its_share_of_retrieval_heads(gates: str):
    policy = duo(gates=gates)
    assert policy.for_request(RequestOptions(0.25)).kept(999) == duo(gates=gates, retrieval=0.25).kept(999)


@pytest.mark.parametrize(
    "content, words",
    [
        ("0.1\t0.2\n", "not those of drifting-llama: 2 layers of 6 KV heads"),
        ("a\tb\n", "cannot read the gates"),
        (None, "cannot read the gates"),
    ],
    ids=["another shape", "no numbers", "no file"],
)
def test_gates_that_do_not_fit(tmp_path: Path, content: str | None, words: str):
    path = tmp_path / "gates.tsv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(PolicyError, match=words):
        duo(gates=str(path))


def test_gates_or_a_profile(gates: str):
    with pytest.raises(PolicyError, match="give gates or profile in --kv-policy-config, not both"):
        duo(gates=gates, profile="profile.json")


def test_a_model_without_a_profile():
    with pytest.raises(PolicyError, match="duo has no shipped head profile for drifting-llama: .*kvplug profile"):
        duo()
