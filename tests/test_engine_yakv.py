"""YAKV in the engine: what every query attends to, and what comes of it, as the reference; the life of its requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import ANGLES
from engine_tools import (
    Ask,
    Watch,
    check_segments,
    greedy,
    one_thread,  # noqa: F401
    runtime,
    serve,
    tiny_engine,
    token_ids,
)
from option_tools import EVERYTHING, assert_idle
from reference import Reference
from reference_yakv import Selecting, Selection
from selection_tools import WatchStored, check_steps, serve_with_slots

from vllm_kvplug.errors import PolicyError
from vllm_kvplug.policies.registry import make_policy
from vllm_kvplug.shape import ModelShape

LENGTHS = (40, 90, 100, 257, 300, 511)  # some too short to select from; 257: the prompt's last chunk is one token
STEPS = 24
TOKEN_BYTES = 3 * 2 * (2 * 16 + 4)
"""Of a token in 4 bits, all heads of the tiny model."""

SHAPE = ModelShape(layers=3, kv_heads=2, query_heads=4, head_dim=32, rotary=(1.0,) * 16)


@pytest.fixture(scope="module")
def reference(tiny_model_dir: Path) -> Reference:
    return Reference(tiny_model_dir)


def yakv(**knobs: Any) -> dict[str, Any]:
    return {"kv_policy": "yakv", "kv_policy_config": {"host_gib": 0.05, **knobs}}


def engine_of(**fields: Any) -> dict[str, Any]:
    """The engine whose policy is a `Selecting` of these fields."""
    if fields.get("landmarks") != "means8":
        return yakv(**fields)
    knobs = {key: value for key, value in fields.items() if key not in ("landmarks", "codec")}
    return {"kv_policy": "shadowkv_landmarks", "kv_policy_config": {"host_gib": 0.05, "local": 64, **knobs}}


CASES: dict[str, dict[str, Any]] = {
    "exact-host": {"codec": "auto"},
    "paper": {},
    "sinks": {"sinks": 5, "local": 16, "ratio": 0.1},
    "capped": {"codec": "auto", "ratio": 0.2, "max_tokens": 33, "local": 20},
    "residual": {"landmarks": "residual", "codec": "auto", "ratio": 0.1},
    "shadowkv": {"landmarks": "means8", "codec": "auto", "ratio": 0.1, "sinks": 3, "local": 24},
}


@pytest.mark.parametrize("chunk", [256, 2048])
@pytest.mark.parametrize("case", CASES)
def test_steps_equal_reference(case: str, chunk: int, tiny_model_dir: Path, reference: Reference) -> None:
    """Requests alone, then all in the same batches."""
    rule = Selecting(ANGLES, **CASES[case])
    with tiny_engine(tiny_model_dir, max_num_batched_tokens=chunk, **engine_of(**CASES[case])) as llm:
        watch = WatchStored(llm, integrity=True)
        alone = [serve(llm, [Ask(token_ids(n), STEPS, sampling=EVERYTHING)])[0] for n in LENGTHS]
        asks = [Ask(token_ids(n), STEPS, arrives=i, sampling=EVERYTHING) for i, n in enumerate(LENGTHS)]
        mixed = serve(llm, asks)
        assert_idle(llm)
    selecting, swaps = 0, 0
    for length, one, other in zip(LENGTHS, alone, mixed, strict=True):
        replay = check_steps(reference, rule, token_ids(length), one, *watch.seen(one))
        seen, again = watch.snapshots[one.request_id], watch.snapshots[other.request_id]
        if (one.tokens, {s.length: s.kept for s in seen}) != (other.tokens, {s.length: s.kept for s in again}):
            check_steps(reference, rule, token_ids(length), other, *watch.seen(other))
        if isinstance(replay.watcher, Selection):
            selecting, swaps = selecting + 1, swaps + replay.watcher.swaps
    assert selecting >= 4 and swaps < 10 * rule.unit


def test_options_of_requests(tiny_model_dir: Path, reference: Reference) -> None:
    """Protected tokens, a budget, a question behind a context token by token, and requests that select nothing."""
    base = {"ratio": 0.1, "sinks": 3, "local": 20, "codec": "auto"}
    cases: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
        (200, {"protect": [10, 40]}, {"protect": ((10, 40),)}),
        (220, {"protect": [0, 5, 150, 215]}, {"protect": ((0, 5), (150, 215))}),
        (250, {"budget": 0.3}, {"ratio": 0.3}),
        (260, {"context_end": 201}, {"context_end": 201}),
        (190, {"off": 1}, {"ratio": 1}),
        (210, {"budget": 1}, {"ratio": 1}),
    ]
    asks = [
        Ask(token_ids(n, 2), 20, sampling={**EVERYTHING, "extra_args": {f"kvplug.{k}": v for k, v in given.items()}})
        for n, given, _ in cases
    ]
    with tiny_engine(tiny_model_dir, max_num_batched_tokens=100, **yakv(**base)) as llm:
        watch = WatchStored(llm, integrity=True)
        answers = serve(llm, asks)
        assert_idle(llm)
    for (_, _, fields), ask, answer in zip(cases, asks, answers, strict=True):
        rule = Selecting(ANGLES, **{**base, **fields})
        replay = check_steps(reference, rule, ask.prompt, answer, *watch.seen(answer))
        assert isinstance(replay.watcher, Selection) == (rule.ratio < 1)


@pytest.mark.parametrize("codec", ["auto", "higgs4"])
def test_preempted_and_aborted_requests(codec: str, tiny_model_dir: Path, reference: Reference) -> None:
    """A request that is computed again selects from its longer prompt; pool and host tier are both too small."""
    knobs = {"ratio": 0.1, "local": 16, "codec": codec}
    limits = {"max_model_len": 512, "num_gpu_blocks_override": 44}
    with tiny_engine(tiny_model_dir, **limits, **yakv(**knobs)) as llm:
        watch = Watch(llm, snapshots=False, integrity=True)
        asks = [Ask(token_ids(230, seed), 140, arrives=seed) for seed in range(6)]
        asks += [Ask(token_ids(200, 9), 100, aborted=step) for step in (1, 20, 60)]
        answers = serve(llm, asks)
        assert_idle(llm)
    ends = [watch.admitted[a.request_id] for a in answers if not a.aborted]
    assert any(len(end) > 1 and end[1] > 240 for end in ends), f"nothing was preempted late enough: {ends}"
    if codec == "auto":
        for ask, answer in zip(asks, answers, strict=True):
            if not answer.aborted:
                check_segments(
                    reference, Selecting(ANGLES, **knobs), ask.prompt, answer.tokens, watch.admitted[answer.request_id]
                )


def test_a_host_tier_that_is_too_small(tiny_model_dir: Path) -> None:
    """Requests wait for room and get the tokens of a roomy engine; one that never fits is refused at the door."""
    asks = [Ask(token_ids(n, 3), 30) for n in (500, 300, 470, 120, 260, 500)]
    with tiny_engine(tiny_model_dir, **yakv()) as llm:
        expected = [serve(llm, [ask])[0].tokens for ask in asks]
    gib = 9.5 * TOKEN_BYTES * 64 / (1 << 30)  # nine slots of 64 tokens
    with tiny_engine(tiny_model_dir, **yakv(host_gib=gib)) as llm:
        assert [a.tokens for a in serve_with_slots(llm, asks, 9)] == expected
        assert_idle(llm)
        with pytest.raises(
            ValueError, match="needs 10 slots of host memory .* has 9: lower max_tokens, or raise host_gib"
        ):
            serve(llm, [Ask(token_ids(570), 60)])


def test_only_misses_are_fetched(tiny_model_dir: Path) -> None:
    """Tokens that the next query wants too stay where they are."""
    with tiny_engine(tiny_model_dir, **yakv(ratio=0.2)) as llm:
        selector, fetched = runtime(llm).selector, []
        fetch = selector._fetch

        def watched(slots: Any, heads: Any, position: Any, where: Any, on: Any) -> None:
            fetched.append(int(on.sum()))
            fetch(slots, heads, position, where, on)

        def watched_select(row_slot: Any, layer: int, query: Any) -> None:
            select(row_slot, layer, query)
            if selector.lines is not None:  # on CUDA
                fetched.append(int(selector.lines.count))

        select, selector._fetch, selector.select = selector.select, watched, watched_select
        serve(llm, [Ask(token_ids(400), 20)])
    first, steps = fetched[0], fetched[1:]
    assert first == 80 * 6 and len(steps) == 19 * 3
    assert 0 < sum(steps) < 0.8 * 19 * first


def test_a_budget_that_holds_everything_is_stock(tiny_model_dir: Path) -> None:
    prompts = [token_ids(n, 4) for n in (5, 120, 256, 300, 700)]
    with tiny_engine(tiny_model_dir, block_size=32) as llm:
        stock = greedy(llm, prompts, 60)
    with tiny_engine(tiny_model_dir, **yakv(ratio=1, codec="auto")) as llm:
        assert greedy(llm, prompts, 60) == stock
        assert_idle(llm)
    with tiny_engine(tiny_model_dir, **yakv(codec="auto")) as llm:
        assert greedy(llm, prompts, 60) != stock, "nothing was left out: the comparison shows nothing"


@pytest.mark.parametrize(
    "knobs, words",
    [
        ({"codec": "fp8"}, "codec"),
        ({"host_gib": 0}, "host_gib"),
        ({"ratio": 0}, "ratio"),
        ({"max_tokens": 8}, "max_tokens is below min_tokens"),
        ({"landmarks": "means"}, "landmarks"),
        ({"local": 0}, "local"),
    ],
)
def test_refused_knobs(knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        make_policy("yakv", knobs, SHAPE)


def test_refused_models() -> None:
    with pytest.raises(PolicyError, match="does not know how .* choose another --kv-policy"):
        make_policy("yakv", {}, replace(SHAPE, rotary=()))
    with pytest.raises(PolicyError, match="at most 256 values, the model's have 512"):
        make_policy("yakv", {}, replace(SHAPE, head_dim=512))
