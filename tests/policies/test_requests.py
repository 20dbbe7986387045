"""A policy as it serves one request: its options, what they cost, and what they leave alone."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from policy_tools import heterocache
from toy_policy import Ends

from vllm_kvplug.config import BudgetConfig
from vllm_kvplug.options import OptionError, RequestOptions
from vllm_kvplug.policies.base import Policy
from vllm_kvplug.policies.registry import make_policy
from vllm_kvplug.policies.snapkv import SnapKV
from vllm_kvplug.shape import ModelShape

SHAPE = ModelShape(layers=3, kv_heads=2, query_heads=4, head_dim=32)


def options(budget: float | None = None, *protect: tuple[int, int], off: bool = False) -> RequestOptions:
    return RequestOptions(budget, protect, off)


def everything(policy: Policy[Any], tokens: int) -> list[list[int]]:
    return [[tokens] * policy.shape.kv_heads] * policy.shape.layers


# ------------------------------------------------------------------------------------------------- budgets


@pytest.mark.parametrize("name", ["random", "snapkv"])
@pytest.mark.parametrize("server", [{}, {"ratio": 0.9}, {"budget_tokens": 7}], ids=str)
def test_a_budget_is_what_a_server_with_that_ratio_keeps(name: str, server: dict[str, Any]):
    served = make_policy(name, server, SHAPE).for_request(options(0.29))
    expected = make_policy(name, {"ratio": 0.29}, SHAPE)
    for tokens in (1, 10, 100, 999):
        assert served.kept(tokens) == served.plan().kept(tokens) == expected.kept(tokens)
    assert served.kept(100) == [[29, 29]] * 3


def test_a_budget_changes_no_other_knob():
    policy = make_policy("snapkv", {"ratio": 0.5, "window": 9, "kernel": 7, "arena_gib": 2}, SHAPE)
    served = policy.for_request(options(0.25))
    assert served.config == policy.config.model_copy(update={"ratio": 0.25})
    assert type(served) is SnapKV and served.query_window == 9


def test_heterocache_budgets_and_drift_sets(tmp_path: Path):
    """Also what was computed at start-up must not be the server's."""
    others = {"min_tokens": 30, "kernel": 7, "codec": "fp8"}
    policy, expected = heterocache(tmp_path, rho=0.9, **others), heterocache(tmp_path, rho=0.55, **others)
    served = policy.for_request(options(0.55))
    assert served.config == expected.config
    for tokens in (1, 17, 100, 1001):
        assert served.kept(tokens) == served.plan().kept(tokens) == expected.kept(tokens)
        assert served.drift_tokens(tokens) == expected.drift_tokens(tokens)
        assert served.host_slots(tokens) == expected.host_slots(tokens)
    assert served.drift_tokens(100) < policy.drift_tokens(100)
    assert served.retrieval == policy.retrieval


def test_a_budget_that_no_prompt_can_meet(tmp_path: Path):
    policy = heterocache(tmp_path, rho=0.6)
    with pytest.raises(OptionError, match="kvplug.budget 0.4: heterocache: rho=0.4 pays for 4 of 12 heads"):
        policy.for_request(options(0.4))
    assert policy.for_request(options(0.5)).config.rho == 0.5


def test_a_budget_for_a_policy_without_one():
    with pytest.raises(OptionError, match="policy 'ends' has no budget that a request could change.*kvplug.budget"):
        make_ends().for_request(options(0.5))


def test_a_budget_that_a_third_partys_config_refuses():
    class Picky(BudgetConfig):
        def model_post_init(self, _context: Any) -> None:
            if self.ratio == 0.5:
                raise ValueError("anything but a half")

    class Policy(Ends):
        Config = Picky

    policy = Policy(Picky(ratio=0.1), SHAPE)
    assert policy.for_request(options(0.25)).config.ratio == 0.25
    with pytest.raises(OptionError, match="kvplug.budget 0.5: .*anything but a half"):
        policy.for_request(options(0.5))


@pytest.mark.parametrize("name, knob", [("snapkv", "ratio"), ("heterocache", "rho")])
def test_the_largest_budget_a_server_allows(tmp_path: Path, name: str, knob: str):
    knobs = {"max_request_budget": 0.7, knob: 0.9}
    policy = heterocache(tmp_path, **knobs) if name == "heterocache" else make_policy(name, knobs, SHAPE)
    assert getattr(policy.for_request(options(0.7)).config, knob) == 0.7
    for refused in (options(0.701), options(1.0), options(off=True), options(None, (0, 5), off=True)):
        with pytest.raises(OptionError, match="at most 0.7, and no kvplug.off"):
            policy.for_request(refused)
    policy.for_request(options(None, (0, 5)))


def test_a_server_allows_everything_unless_told_otherwise():
    policy = make_policy("snapkv", {"ratio": 0.1}, SHAPE)
    assert policy.for_request(options(1.0)).kept(50) == everything(policy, 50)
    assert policy.for_request(options(off=True)).options.off


@pytest.mark.parametrize(
    "asked",
    [options(0.5), options(1.0), options(off=True), options(None, (0, 2)), RequestOptions(context_end=5)],
    ids=str,
)
def test_streaming_is_the_same_for_all(asked: RequestOptions):
    """Its ring is a property of the engine, and would drop tokens that a request protects."""
    policy = make_policy("streaming", {}, SHAPE)
    with pytest.raises(OptionError, match="policy 'streaming' has one ring for all: remove kvplug.[a-z_]+$"):
        policy.for_request(asked)
    assert policy.for_request(options()) is policy


# ----------------------------------------------------------------------------------------- the server's own


@pytest.mark.parametrize("asked", [options(0.6), options(off=True), options(0.55, (3, 60)), options(None, (0, 90))])
def test_the_servers_policy_stays_as_it_is(tmp_path: Path, asked: RequestOptions):
    policy = heterocache(tmp_path, rho=0.7)
    kept, slots, plan = policy.kept(100), policy.host_slots(100), policy.plan()
    before = dict(vars(policy))
    served = policy.for_request(asked)
    assert served is not policy and served.options == asked
    assert served.plan().kept(100) != kept
    assert vars(policy) == before and policy.options == RequestOptions()
    assert policy.kept(100) == policy.plan().kept(100) == plan.kept(100) == kept
    assert policy.host_slots(100) == slots and policy.evicts


def test_no_options_no_other_object():
    policy = make_policy("snapkv", {}, SHAPE)
    assert policy.for_request(RequestOptions()) is policy
    served = policy.for_request(options(0.25))
    assert served.for_request(options(0.25)) is served


def test_a_request_that_waits_is_not_worked_out_again():
    """What its plan has computed is kept with it; a policy of the same kind has others."""
    one, other = make_policy("snapkv", {}, SHAPE), make_policy("snapkv", {"window": 9}, SHAPE)
    served = one.for_request(options(0.25))
    assert one.for_request(options(0.25)) is served and served.plan() is served.plan()
    assert other.for_request(options(0.25)) is not served and one.for_request(options(0.26)) is not served


# -------------------------------------------------------------------------------------------- off, protect


def test_off_is_dense(tmp_path: Path):
    policy = heterocache(tmp_path, rho=0.6)
    served = policy.for_request(options(None, (0, 5), off=True))
    plan = served.plan()
    assert not served.evicts and not plan.shrinks
    for tokens in (1, 16, 17, 500):
        assert plan.kept(tokens) == everything(policy, tokens)
        assert plan.decode_blocks(tokens, tokens + 1) == ceil((tokens + 1) / 16)
        assert served.offloaded(tokens, range(6)) == [] and served.host_slots(tokens) == 0
    assert policy.plan().shrinks


def test_protected_tokens_fit_in_the_budget_or_come_on_top(tmp_path: Path):
    policy = heterocache(tmp_path, rho=0.6)
    served = policy.for_request(options(None, (4, 10), (60, 90)))
    assert served.kept(100) == policy.kept(100) == [[24, 100, 56, 40, 100, 32], [48, 60, 100, 20, 40, 100]]
    kept = [[36, 100, 56, 40, 100, 36], [48, 60, 100, 36, 40, 100]]
    assert served.plan().kept(100) == kept
    pages = sum(ceil(count / 16) for layer in kept for count in layer)
    assert served.plan().decode_pages(100, 100) == pages > policy.plan().decode_pages(100, 100)


@pytest.mark.parametrize("tokens, protected", [(3, 0), (4, 0), (9, 5), (10, 6), (60, 6), (61, 7), (200, 20)])
def test_a_range_counts_as_far_as_the_prompt_goes(tokens: int, protected: int):
    served = make_policy("snapkv", {"budget_tokens": 1}, SHAPE).for_request(options(None, (4, 10), (60, 74)))
    assert served.plan().kept(tokens) == [[max(protected, 1)] * 2] * 3


def test_a_budget_with_protected_tokens():
    served = make_policy("snapkv", {}, SHAPE).for_request(options(0.1, (0, 25)))
    assert [served.plan().kept(tokens)[0][0] for tokens in (10, 100, 400)] == [10, 25, 40]


def make_ends() -> Ends:
    return Ends(Ends.Config(ends=3), SHAPE)


def test_a_third_partys_policy_protects_too():
    served = make_ends().for_request(options(None, (10, 30)))
    assert served.plan().kept(100) == [[20] * 2] * 3 and served.plan().kept(8) == [[6] * 2] * 3


# ------------------------------------------------------------------------------------------------ host tier

SATELLITES = {(0, 0), (0, 2), (0, 3), (0, 5), (1, 1), (1, 3)}


@pytest.mark.parametrize("knobs", [{"rho": 0.6}, {"rho": 0.9}, {"rho": 0.9, "as_released": True}, {"rho": 1}], ids=str)
@pytest.mark.parametrize("protect", [(), ((0, 30),), ((5, 80),)], ids=str)
@pytest.mark.parametrize("heads", [range(6), range(0, 3), range(3, 6), range(1, 2)], ids=str)
def test_satellites_that_are_cut_are_offloaded(tmp_path: Path, knobs: dict[str, Any], protect: Any, heads: range):
    """Anchors are cut and stay away; satellites that keep their prompt have nothing to fetch."""
    served = heterocache(tmp_path, **knobs).for_request(options(None, *protect))
    for tokens in (1, 16, 17, 30, 80, 81, 300):
        kept = served.plan().kept(tokens)
        found = served.offloaded(tokens, heads)
        assert sorted(found) == [p for p in sorted(SATELLITES) if p[1] in heads and kept[p[0]][p[1]] < tokens]
        assert [layer for layer, _ in found] == sorted(layer for layer, _ in found)


@pytest.mark.parametrize("tensor_parallel, neediest", [(1, 6), (2, 3), (3, 3), (6, 2), (12, 2)])
def test_host_slots_are_the_neediest_ranks(tmp_path: Path, tensor_parallel: int, neediest: int):
    """With 3 ranks they hold 2, 3 and 1 satellites; beyond 6 ranks heads are replicated."""
    policy = heterocache(tmp_path, rho=0.6, tensor_parallel=tensor_parallel)
    for tokens, per_head in [(64, 1), (65, 2), (128, 2), (1000, 16)]:
        assert policy.host_slots(tokens) == neediest * per_head
    assert policy.host_slots(16) == 0
    shape = policy.shape
    ranks = [policy.offloaded(100, shape.rank_heads(rank)) for rank in range(tensor_parallel)]
    assert {place for rank in ranks for place in rank} == SATELLITES
    assert max(map(len, ranks)) == neediest


@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize(
    "knobs, itemsize, token",
    [({}, 4, 256), ({}, 2, 128), ({"codec": "fp8"}, 4, 68), ({"codec": "fp8"}, 2, 68), ({"codec": "higgs4"}, 2, 36)],
    ids=str,
)
def test_host_capacity(tmp_path: Path, tensor_parallel: int, knobs: dict[str, Any], itemsize: int, token: int):
    """Every rank has host_gib of its own; a part of a slot is none."""
    policy = heterocache(tmp_path, tensor_parallel=tensor_parallel, host_gib=0.001, **knobs)
    assert policy.host_slot_bytes(itemsize) == 64 * token
    assert policy.host_capacity(itemsize) == int(0.001 * 2**30 / (64 * token))


def test_no_host_tier(tmp_path: Path):
    for policy in (heterocache(tmp_path, host_gib=0), make_policy("snapkv", {}, replace(SHAPE, tensor_parallel=2))):
        assert policy.retrieval is None
        assert (policy.offloaded(100, range(6)), policy.host_slots(100), policy.host_capacity(4)) == ([], 0, 0)
