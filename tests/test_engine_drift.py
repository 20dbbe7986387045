"""Retrieval on drift in the engine: triggers, what satellites hold in every step, and its effect, as the reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from drift_tools import check_steps, knobs, rule
from engine_tools import (
    Ask,
    Watch,
    check_segments,
    counting,
    greedy,
    one_thread,  # noqa: F401
    runtime,
    serve,
    tiny_engine,
    token_ids,
)
from reference import Reference
from reference_drift import HeteroCacheDrift

from benchmarks.drift_model import PROFILE, make_model, write_profile

LENGTHS = (40, 257, 300, 511)  # 257: the prompt's last chunk is one token
STEPS = 43  # eight windows of five queries and a part of one
EVERYTHING = {"logprobs": -1}
TOKEN_BYTES = 2 * 32 * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("drift"))


@pytest.fixture(scope="module")
def profile(model: Path) -> Path:
    return write_profile(model, model.parent / "profile.json")


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


@contextmanager
def drifting(model: Path, profile: Path, rule: HeteroCacheDrift, more: dict[str, Any], **arguments: Any) -> Iterator:
    settings = {"kv_policy": "heterocache", "kv_policy_config": knobs(profile, rule, **more)}
    with tiny_engine(model, **settings, **arguments) as llm:
        yield llm
        assert_idle(llm)


def assert_idle(llm: Any) -> None:
    state = runtime(llm)
    assert not state.live and sorted(state._free_slots) == list(range(state.geometry.max_requests))
    retriever = state.retriever
    assert retriever.host.used == 0 and not retriever.staging._taken
    assert not any(flight.pieces for flight, *_ in retriever._held_back)


CASES = {
    "next-step": (rule(), {}),
    "after-four": (rule(land_after=4), {}),
    "later-than-the-next-check": (rule(land_after=7), {}),
    "as-released": (rule(released=True), {}),
    "limited": (rule(step_tokens=64), {"fetch_mib_per_step": 64 * TOKEN_BYTES / (1 << 20)}),
}


@pytest.mark.parametrize("chunk", [256, 2048])
@pytest.mark.parametrize("case", CASES)
def test_steps_equal_reference(case: str, chunk: int, model: Path, profile: Path, reference: Reference) -> None:
    """Requests alone, then all in the same batches."""
    drift, more = CASES[case]
    with drifting(model, profile, drift, more, max_num_batched_tokens=chunk) as llm:
        watch, counters = Watch(llm, integrity=True), counting(llm)
        alone = [serve(llm, [Ask(token_ids(n), STEPS, sampling=EVERYTHING)])[0] for n in LENGTHS]
        asks = [Ask(token_ids(n), STEPS, arrives=i, sampling=EVERYTHING) for i, n in enumerate(LENGTHS)]
        mixed = serve(llm, asks)
    watchers = []
    for length, one, other in zip(LENGTHS, alone, mixed, strict=True):
        seen, again = watch.snapshots[one.request_id], watch.snapshots[other.request_id]
        watchers.append(check_steps(reference, drift, token_ids(length), one, seen))
        if (one.tokens, {s.length: s.kept for s in seen}) != (other.tokens, {s.length: s.kept for s in again}):
            check_steps(reference, drift, token_ids(length), other, again)
    triggers, shares = sum(len(w.triggers) for w in watchers), sum(len(w.shares) for w in watchers)
    assert 10 < triggers < shares - 10, "the threshold decides nothing here"
    assert counters["triggers"] == 2 * triggers
    assert counters["checks"] == 2 * len(LENGTHS) * (STEPS // 5)


def test_late_copies_are_waited_for_and_counted(model: Path, profile: Path, reference: Reference) -> None:
    """A slow interconnect changes nothing but the counters; nor does a staging buffer that is too small."""
    drift, prompt = rule(), token_ids(300)
    expected = reference.replay(prompt, drift, STEPS)
    with drifting(model, profile, drift, {}) as llm:
        retriever, counters = runtime(llm).retriever, counting(llm)
        retriever.staging._taken = [(0, len(retriever.staging.buffer))]
        assert greedy(llm, [prompt], STEPS) == [expected.tokens]
        retriever.staging._taken.clear()
    assert counters["triggers"] == len(expected.watcher.triggers)
    assert counters["landings"] == counters["late_landings"] > 0 and counters["late_microseconds"] > 0


def test_no_drift_is_no_retrieval(model: Path, profile: Path) -> None:
    prompts = [token_ids(n) for n in LENGTHS]
    never = rule(threshold=0.0)
    with drifting(model, profile, never, {}) as llm:
        counters = counting(llm)
        without_triggers = greedy(llm, prompts, STEPS)
        assert counters["checks"] > counters["triggers"] == 0
    settings = {"kv_policy": "heterocache", "kv_policy_config": knobs(profile, never, host_gib=0)}
    with tiny_engine(model, **settings) as llm:
        assert runtime(llm).retriever is None
        assert greedy(llm, prompts, STEPS) == without_triggers


def test_full_budget_equals_stock(model: Path, profile: Path) -> None:
    """Nothing is cut at rho 1, so nothing goes to the host and every token is stock vLLM's."""
    prompts = [token_ids(n) for n in LENGTHS]
    with tiny_engine(model, block_size=32) as llm:
        stock = greedy(llm, prompts, STEPS)
    with drifting(model, profile, rule(rho=1.0), {}) as llm:
        counters = counting(llm)
        assert greedy(llm, prompts, STEPS) == stock
        assert counters["checks"] == 0


def test_fp8_on_the_host(model: Path, profile: Path, reference: Reference) -> None:
    """Rounding on the host moves distributions a little; what the first trigger fetches is the same."""
    drift, prompt = rule(), token_ids(300)
    with drifting(model, profile, drift, {"codec": "fp8"}) as llm:
        watch = Watch(llm)
        (answer,) = serve(llm, [Ask(prompt, STEPS, sampling=EVERYTHING)])
        stored = {s.length: s.kept for s in watch.snapshots[answer.request_id]}
    replay = reference.replay(prompt, drift, STEPS, force_tokens=answer.tokens)
    first = replay.watcher.triggers[0][0]
    steps = [length for length in replay.kept if length <= first + 1]
    assert all([[sorted(h) for h in layer] for layer in replay.kept[n]] == stored[n] for n in steps)
    error = (answer.logprobs - replay.logits.log_softmax(-1)).abs().amax(1)
    before, after = error[: first - len(prompt) + 1], error[first - len(prompt) + 1]
    assert before.max() < 1e-4 < after < 1.0


def test_preempted_after_a_trigger(model: Path, profile: Path, reference: Reference) -> None:
    """A resumed request starts anew from its longer prompt: baselines, budgets and host slots too."""
    drift, prompts = rule(), [token_ids(300, seed) for seed in range(4)]
    limits = {"num_gpu_blocks_override": 64, "max_model_len": 500}
    with drifting(model, profile, drift, {}, **limits) as llm:
        watch, counters = Watch(llm, snapshots=False, integrity=True), counting(llm)
        answers = serve(llm, [Ask(prompt, 110) for prompt in prompts])
        assert counters["landings"] > 0
    ends = [watch.admitted[a.request_id] for a in answers]
    assert any(len(e) > 1 and e[1] > 310 for e in ends), f"no request was preempted late enough: {ends}"
    for prompt, answer, end in zip(prompts, answers, ends, strict=True):
        check_segments(reference, drift, prompt, answer.tokens, end)


def test_profile_exercises_the_rules() -> None:
    """Satellites of a cluster have unlike budgets, and pivots of a layer are out of order."""
    assert list(PROFILE["clusters"][0]) != sorted(PROFILE["clusters"][0])
    assert len({PROFILE["weights"][0][h] for h in PROFILE["clusters"][0][4]}) == 2
