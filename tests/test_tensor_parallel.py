"""Two ranks: pivots and satellites apart, equal plans, and the tokens of the reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import ANGLES, fastkvzip, fastkvzip_yakv, snapkv, wgkv
from drift_tools import knobs, rule
from engine_tools import (
    ROUNDING,
    Answer,
    Ask,
    serve,
    tiny_engine,
    token_ids,
)
from reference import Reference, Rule
from reference_quest import Quest
from reference_yakv import Selecting

from benchmarks.drift_model import KV_HEADS, LAYERS, PROFILE, QUERY_HEADS, make_model, write_profile

LENGTHS = (40, 257)
STEPS = 23


@pytest.fixture(autouse=True)
def any_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would give every rank a memory node of its own."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


def answers(model: Path, **arguments: Any) -> list[Answer]:
    with tiny_engine(model, tensor_parallel_size=2, **arguments) as llm:
        asks = [Ask(token_ids(n), STEPS, arrives=i, sampling={"logprobs": -1}) for i, n in enumerate(LENGTHS)]
        return serve(llm, asks)


def check(rule: Rule, reference: Reference, found: list[Answer]) -> None:
    for length, answer in zip(LENGTHS, found, strict=True):
        replay = reference.replay(token_ids(length), rule, STEPS)
        assert answer.tokens == replay.tokens, f"prompt of {length}"
        assert (answer.logprobs - replay.logits.log_softmax(-1)).abs().max() < 2 * ROUNDING


def test_clusters_span_ranks() -> None:
    """Rank 0 has KV heads 0 to 2: one pivot of layer 0 leads satellites on the other rank, one on both."""
    apart = {(pivot // 3, head // 3) for led in PROFILE["clusters"] for pivot, heads in led.items() for head in heads}
    assert {(0, 1), (1, 0)} <= apart


@pytest.mark.parametrize("land_after", [1, 4])
def test_retrieval(land_after: int, model: Path, reference: Reference) -> None:
    drift = rule(land_after=land_after)
    profile = write_profile(model, model.parent / "profile.json")
    found = answers(model, kv_policy="heterocache", kv_policy_config=knobs(profile, drift))
    check(drift, reference, found)
    assert any(reference.replay(token_ids(n), drift, STEPS).watcher.triggers for n in LENGTHS)


def test_another_policy(model: Path, reference: Reference, tmp_path: Path) -> None:
    case = snapkv(0.3)
    check(case.rule, reference, answers(model, **case.arguments(model, tmp_path)))


@pytest.mark.parametrize("allocation", ["joint", "layer"])
def test_shared_budgets(allocation: str, model: Path, reference: Reference, tmp_path: Path) -> None:
    """Each rank's heads share the rank's part of the budget; the gate sees the hidden states on every rank."""
    shape = (LAYERS, KV_HEADS, QUERY_HEADS // KV_HEADS, 96)
    case = fastkvzip(0.3, 24, 100, share=0.1, shape=shape, allocation=allocation)
    found = answers(model, **case.arguments(model, tmp_path))
    check(replace(case.rule, ranks=2), reference, found)
    assert [reference.replay(token_ids(n), case.rule, STEPS).kept_after_prompt for n in LENGTHS] != [
        reference.replay(token_ids(n), replace(case.rule, ranks=2), STEPS).kept_after_prompt for n in LENGTHS
    ]


def test_admission(model: Path, reference: Reference, tmp_path: Path) -> None:
    """Each rank caps what its own heads admit."""
    case = wgkv(model, (LAYERS, KV_HEADS, 32), cap=0.2, every=100, window=24)
    found = answers(model, **case.arguments(model, tmp_path))
    check(replace(case.rule, ranks=2), reference, found)


def test_admission_with_a_host(model: Path, reference: Reference, tmp_path: Path) -> None:
    """Each rank has on its host what its own heads admitted."""
    case = wgkv(model, (LAYERS, KV_HEADS, 32), codec="auto", ratio=0.2, cap=0.6, every=100, window=24)
    check(replace(case.rule, ranks=2), reference, answers(model, **case.arguments(model, tmp_path)))


def test_selection(model: Path, reference: Reference, tmp_path: Path) -> None:
    """Each rank has the prompt of its own heads on its host, or part of it, or their bounds."""
    knobs = {"ratio": 0.2, "local": 16, "codec": "auto", "host_gib": 0.01}
    found = answers(model, kv_policy="yakv", kv_policy_config=knobs)
    check(Selecting(ANGLES, ratio=0.2, local=16, codec="auto"), reference, found)
    shape = (LAYERS, KV_HEADS, QUERY_HEADS // KV_HEADS, 96)
    case = fastkvzip_yakv(0.2, 0.4, 24, 100, share=0.1, shape=shape, codec="auto", fetch=0.1)
    check(replace(case.rule, ranks=2), reference, answers(model, **case.arguments(model, tmp_path)))
    found = answers(model, kv_policy="quest", kv_policy_config={"ratio": 0.3, "dense_layers": 0})
    check(Quest(0.3, dense_layers=0), reference, found)
