"""HeteroCache's budgets against the reference's, and the settings of its retrieval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from policy_tools import heterocache
from reference_drift import HeteroCacheDrift

from benchmarks.drift_model import KV_HEADS, LAYERS, PROFILE
from vllm_kvplug.calibrate.profile import ProfileSettings
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.policies.base import Cluster, Retrieval

LENGTHS = [1, 2, 15, 16, 17, 33, 100, 257, 1000, 1001]

ALONE: dict[str, Any] = {
    "roles": [["anchor", "volatile"] * 3] * 2,
    "weights": [[1.0, -1.0] * 3] * 2,
    "clusters": [{}, {}],
}
"""No clusters."""


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("rho", [0.42, 0.5, 0.65, 0.9, 1.0])
def test_budgets_are_the_references(tmp_path: Path, rho: float, released: bool):
    policy = heterocache(tmp_path, rho=rho, as_released=released)
    rule = HeteroCacheDrift(profile=PROFILE, rho=rho, released=released)
    for tokens in LENGTHS:
        assert [list(row) for row in policy.kept(tokens)] == rule.budgets(LAYERS, KV_HEADS, tokens)
        assert policy.drift_tokens(tokens) == rule.base(LAYERS * KV_HEADS, tokens)


def test_released_budgets_by_hand(tmp_path: Path):
    """L_base is (12 * 60 - 4 * 100) / 8 = 40 of 100 tokens; what a cap or a rounding takes is lost."""
    policy = heterocache(tmp_path, rho=0.6, as_released=True)
    assert policy.drift_tokens(100) == 40
    assert policy.kept(100) == [[24, 100, 56, 40, 100, 32], [48, 60, 100, 20, 40, 100]]
    assert policy.drift_tokens(3) == 1  # 1.2
    assert policy.kept(3) == [[1, 3, 1, 1, 3, 1], [1, 1, 3, 1, 1, 3]]
    whole = heterocache(tmp_path, rho=1, as_released=True)
    assert whole.kept(10) == [[6, 10, 10, 10, 10, 8], [10, 10, 10, 5, 10, 10]]


def test_drift_sets_of_a_profile_that_cuts_nothing(tmp_path: Path):
    whole = {"roles": [["volatile"] * 6] * 2, "weights": [[-1.0] * 6] * 2, "clusters": [{}, {}]}
    policy = heterocache(tmp_path, whole, rho=0.5)
    assert policy.kept(9) == [[9] * 6] * 2
    assert policy.drift_tokens(9) == 1


def test_retrieval_by_default(tmp_path: Path):
    assert heterocache(tmp_path).retrieval == Retrieval(
        (Cluster(0, 4, (0, 2)), Cluster(0, 1, (3, 5)), Cluster(1, 2, (1, 3))),
        threshold=0.5,
        window=5,
        kernel=5,
        land_after=1,
        codec="auto",
        step_mib=None,
        as_released=False,
    )


def test_retrieval_as_the_knobs_say(tmp_path: Path):
    knobs = {"drift_window": 7, "kernel": 3, "land_after": 4, "codec": "fp8", "fetch_mib_per_step": 1.5}
    found = heterocache(tmp_path, tau_drift=0.3, as_released=True, **knobs).retrieval
    assert found is not None and found.as_released
    assert (found.threshold, found.window, found.kernel, found.land_after) == (0.3, 7, 3, 4)
    assert (found.codec, found.step_mib) == ("fp8", 1.5)


@pytest.mark.parametrize("tau_drift, threshold", [(None, 0.35), (0.8, 0.8), (0.0, 0.0)])
def test_the_threshold_is_the_profiles_unless_given(tmp_path: Path, tau_drift: float | None, threshold: float):
    policy = heterocache(tmp_path, settings=ProfileSettings(tau_stable=0.35), tau_drift=tau_drift)
    assert policy.retrieval is not None and policy.retrieval.threshold == threshold


def test_no_clusters_no_retrieval(tmp_path: Path):
    policy = heterocache(tmp_path, ALONE, rho=0.7, host_gib=4, as_released=True, tensor_parallel=2)
    assert policy.retrieval is None and policy.offloaded(100, range(6)) == [] and policy.host_capacity(2) == 0


def test_as_released_needs_one_gpu(tmp_path: Path):
    with pytest.raises(PolicyError, match="as_released needs one GPU: remove it from --kv-policy-config"):
        heterocache(tmp_path, as_released=True, tensor_parallel=2)
    assert heterocache(tmp_path, as_released=True, tensor_parallel=2, host_gib=0).retrieval is None


@pytest.mark.parametrize("knob, value", [("tau_drift", 1.1), ("drift_window", 4), ("land_after", 0), ("codec", "int4")])
def test_knobs_of_retrieval_are_checked(tmp_path: Path, knob: str, value: Any):
    with pytest.raises(PolicyError, match=knob):
        heterocache(tmp_path, **{knob: value})


def test_higgs4_takes_heads_up_to_its_largest_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("vllm_kvplug.policies.heterocache.MAX_GROUP", 32)
    assert heterocache(tmp_path, codec="higgs4").retrieval is not None
    monkeypatch.setattr("vllm_kvplug.policies.heterocache.MAX_GROUP", 16)
    with pytest.raises(PolicyError, match="at most 16 values, the model's have 32: set codec to fp8"):
        heterocache(tmp_path, codec="higgs4")
