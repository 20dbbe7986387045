"""Requests at the door: refused before they enter the engine, or certain to fit its host tier."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_tools import SLOT_GIB, heterocache

from vllm_kvplug.cuts import Cuts, DecodeCuts
from vllm_kvplug.door import check_request, longest_request
from vllm_kvplug.options import OptionError, RequestOptions
from vllm_kvplug.policies.base import Policy
from vllm_kvplug.policies.knorm import Knorm, KnormConfig
from vllm_kvplug.policies.registry import make_policy
from vllm_kvplug.shape import ModelShape

FLOAT32 = 4


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy[Any]:
    """Cuts all of its six satellites at these lengths, and has room for four slots of each: 256 tokens."""
    return heterocache(tmp_path_factory.mktemp("profile"), rho=0.6, host_gib=24 * SLOT_GIB)


def test_the_policy_is_as_described(policy: Policy[Any]):
    assert policy.host_capacity(FLOAT32) == 24
    assert [policy.host_slots(n) for n in (16, 64, 65, 256, 257)] == [0, 6, 12, 24, 30]


def test_requests_that_fit_the_host_tier(policy: Policy[Any]):
    check_request(policy, None, 1, 1, FLOAT32)
    check_request(policy, {"another.key": 1}, 100, 256, FLOAT32)
    with pytest.raises(OptionError) as caught:
        check_request(policy, None, 100, 257, FLOAT32)
    for words in ("up to 257 tokens needs 30 slots", "host_gib=0.000366211 has 24", "max_tokens", "--kv-policy-config"):
        assert words in str(caught.value)
    with pytest.raises(OptionError, match="has 24"):
        check_request(policy, None, 257, 257, FLOAT32)


def test_the_size_of_an_element_counts(policy: Policy[Any]):
    check_request(policy, None, 100, 512, itemsize=2)
    with pytest.raises(OptionError, match="up to 513 tokens needs 54 slots.*has 48"):
        check_request(policy, None, 100, 513, itemsize=2)


@pytest.mark.parametrize("options", [{"kvplug.off": True}, {"kvplug.budget": 1.0}, {"kvplug.protect": [0, 900]}])
def test_options_may_spare_the_host_tier(policy: Policy[Any], options: dict[str, Any]):
    """What is not cut is not offloaded."""
    check_request(policy, options, 900, 900, FLOAT32)
    with pytest.raises(OptionError, match="host memory"):
        check_request(policy, None, 900, 900, FLOAT32)


@pytest.mark.parametrize("rho", [0.6, 0.95])
def test_slots_do_not_fall_as_a_request_grows(tmp_path: Path, rho: float):
    """A request is let in for its longest self; at any length below it may begin anew, and must find room."""
    policy = heterocache(tmp_path, rho=rho)
    slots = [policy.host_slots(n) for n in range(1, 700)]
    assert [n for n in slots if n] == sorted(n for n in slots if n)
    assert slots[16] == 6, "one of six satellites is cut at 17 tokens and rho 0.95, and room is kept for all"


@pytest.mark.parametrize("policy_name", ["snapkv", "streaming"])
def test_policies_without_a_host_tier_take_any_length(policy_name: str):
    policy = make_policy(policy_name, {}, ModelShape(2, 2, 4, 32))
    check_request(policy, None, 10, 1_000_000, FLOAT32)
    assert longest_request(policy, 1_000_000, FLOAT32) == 1_000_000


def test_protected_ranges_lie_in_the_prompt(policy: Policy[Any]):
    check_request(policy, {"kvplug.protect": [0, 5, 90, 100]}, 100, 200, FLOAT32)
    with pytest.raises(OptionError, match="kvplug.protect: the prompt has 99 tokens, a range ends at 100"):
        check_request(policy, {"kvplug.protect": [0, 5, 90, 100]}, 99, 200, FLOAT32)


def test_contexts_lie_in_the_prompt():
    policy = make_policy("snapkv", {}, ModelShape(2, 2, 4, 32))
    for end in (1, 99, 100):
        check_request(policy, {"kvplug.context_end": end}, 100, 200, FLOAT32)
    with pytest.raises(OptionError, match="kvplug.context_end: the prompt has 99 tokens, the context ends at 100"):
        check_request(policy, {"kvplug.context_end": 100}, 99, 200, FLOAT32)


def test_what_follows_a_context_is_kept_like_protected_tokens():
    """Or else a context of one token would keep more than the server allows."""
    policy = make_policy("snapkv", {"max_request_budget": 0.3}, ModelShape(2, 2, 4, 32))
    check_request(policy, {"kvplug.context_end": 70}, 100, 200, FLOAT32)
    check_request(policy, {"kvplug.context_end": 90, "kvplug.protect": [0, 10, 80, 100]}, 100, 200, FLOAT32)
    for options in ({"kvplug.context_end": 69}, {"kvplug.context_end": 70, "kvplug.protect": [69, 80]}):
        with pytest.raises(OptionError, match="kvplug.context_end: 31 of 100 tokens are more than the share of 0.3"):
            check_request(policy, options, 100, 200, FLOAT32)


def test_only_contexts_need_room_on_the_host(policy: Policy[Any]):
    check_request(policy, {"kvplug.context_end": 256}, 300, 500, FLOAT32)
    with pytest.raises(OptionError, match="needs 30 slots"):
        check_request(policy, {"kvplug.context_end": 257}, 300, 500, FLOAT32)


@pytest.mark.parametrize("limit, most", [(1.0, 100), (0.5, 50), (0.29, 29)])
def test_protected_tokens_are_at_most_what_a_request_may_keep(limit: float, most: int):
    policy = make_policy("snapkv", {"max_request_budget": limit, "ratio": 0.1}, ModelShape(2, 2, 4, 32))
    check_request(policy, {"kvplug.protect": [0, 9, 100 - most + 9, 100]}, 100, 200, FLOAT32)
    if most < 100:
        with pytest.raises(OptionError, match=f"{most + 1} of 100 tokens are more than the share of {limit}"):
            check_request(policy, {"kvplug.protect": [0, 9, 100 - most + 8, 100]}, 100, 200, FLOAT32)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"kvplug.nope": 1}, "kvplug.nope: no such option"),
        ({"kvplug.budget": 2}, "at most 1"),
        ({"kvplug.budget": 0.3}, "kvplug.budget 0.3: heterocache: rho=0.3 pays for 3 of 12 heads"),
    ],
)
def test_options_are_checked_against_the_policy(policy: Policy[Any], options: dict[str, Any], words: str):
    with pytest.raises(OptionError, match=words):
        check_request(policy, options, 100, 200, FLOAT32)


def test_options_stay_with_their_request(policy: Policy[Any]):
    check_request(policy, {"kvplug.off": True}, 900, 900, FLOAT32)
    assert policy.options == RequestOptions() and policy.host_slots(256) == 24


@pytest.mark.parametrize("slots, longest", [(5, 16), (6, 64), (11, 64), (24, 256), (10_000, 700)])
def test_longest_request(tmp_path: Path, slots: int, longest: int):
    policy = heterocache(tmp_path, rho=0.6, host_gib=slots * SLOT_GIB)
    assert longest_request(policy, 700, FLOAT32) == longest


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 60), st.integers(0, 300))
def test_longest_request_is_the_last_that_passes(policy: Policy[Any], slots: int, most: int):
    policy = type(policy)(policy.config.model_copy(update={"host_gib": slots * SLOT_GIB}), policy.shape)
    fitting = [n for n in range(1, most + 1) if policy.host_slots(n) <= slots]
    assert longest_request(policy, most, FLOAT32) == max(fitting, default=0)


class Evicting(Knorm):
    """As knorm, and evicts while decoding: most requests need less than a dense one of the maximum length."""

    def cuts(self, prompt_len: int) -> Cuts:
        return replace(super().cuts(prompt_len), decode=DecodeCuts(128, 256, 4, 128))


@pytest.mark.parametrize("options", [{"kvplug.off": True}, {"kvplug.budget": 1.0}, {"kvplug.protect": [0, 900]}])
def test_options_that_need_more_blocks_than_there_are(options: dict[str, Any]):
    """Such a request would wait for ever, and all others behind it."""
    policy = Evicting(KnormConfig(ratio=0.2, cut_every=128), ModelShape(2, 2, 4, 32))
    blocks = policy.plan().peak_blocks(1024) + 1
    check_request(policy, None, 1000, 1024, FLOAT32, blocks)
    with pytest.raises(OptionError, match=f"needs 6[0-9] blocks of the KV cache, which has {blocks - 1}: lower"):
        check_request(policy, options, 1000, 1024, FLOAT32, blocks)
    check_request(policy, options, 1000, 1024, FLOAT32, 66)
    check_request(policy, options, 1000, 1024, FLOAT32)  # not known yet
    check_request(policy, {"kvplug.budget": 0.1}, 1000, 1024, FLOAT32, blocks)
