"""R-KV's eviction while requests decode: what every head stores after each cut is the reference's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_tools import (
    Ask,
    Watch,
    check_logprobs,
    check_segments,
    greedy,
    one_thread,  # noqa: F401
    scheduler,
    serve,
    tiny_engine,
    token_ids,
)
from option_tools import EVERYTHING, assert_idle
from reference import Reference, Replay
from reference_rkv import RKV

BUDGET = 64


@pytest.fixture(scope="module")
def reference(tiny_model_dir: Path) -> Reference:
    return Reference(tiny_model_dir)


def rkv(budget: int = BUDGET, **knobs: Any) -> dict[str, Any]:
    return {"kv_policy": "rkv", "kv_policy_config": {"decode_budget": budget, **knobs}}


def check_cuts(replay: Replay, snapshots: list[Any], prompt: int) -> None:
    """Of every step behind the prompt."""
    seen = [s for s in snapshots if s.length > prompt]
    assert seen and replay.watcher.kept
    for snapshot in seen:
        assert snapshot.kept == replay.watcher.kept.get(snapshot.length, replay.kept[snapshot.length]), snapshot.length


@pytest.mark.parametrize("importance", [0.1, 0.7])
@pytest.mark.parametrize("chunk", [100, 2048])
def test_cuts_equal_reference(
    chunk: int, importance: float, tiny_model_dir: Path, reference: Reference, tmp_path: Path
) -> None:
    """Prompts below and above the budget, which end next to a cut, in one batch; several cuts of each."""
    lengths, steps = (20, 63, 121, 127, 128, 300), 280
    asks = [Ask(token_ids(n), steps, arrives=i, sampling=EVERYTHING) for i, n in enumerate(lengths)]
    engine = rkv(importance=importance)
    with tiny_engine(tiny_model_dir, max_num_batched_tokens=chunk, **engine) as llm:
        watch = Watch(llm, integrity=True)
        blocks: list[int] = []
        manager = scheduler(llm)._head_pages

        def look() -> None:
            blocks.extend(sum(not b.is_null for b in row) for row in manager.req_to_blocks.values())

        answers = serve(llm, asks, look)
        assert_idle(llm)
    rule = RKV(BUDGET, importance)
    for n, ask, answer in zip(lengths, asks, answers, strict=True):
        replay = reference.replay(ask.prompt, rule, steps)
        check_cuts(replay, watch.snapshots[answer.request_id], n)
        check_logprobs(answer, replay)
        stored = {len(head) for layer in watch.snapshots[answer.request_id][-1].kept for head in layer}
        assert max(stored) == min(stored) <= BUDGET + 128
    assert max(blocks[-100:]) <= (BUDGET + 128) // 16 + 1


def test_options_of_requests(tiny_model_dir: Path, reference: Reference) -> None:
    """Protected tokens, more than the budget of them, a question behind a context, and nothing dropped."""
    cases: list[tuple[int, dict[str, Any], RKV]] = [
        (150, {"protect": [10, 40]}, RKV(BUDGET, protect=((10, 40),))),
        (200, {"protect": [0, 100]}, RKV(BUDGET, protect=((0, 100),))),
        (250, {"context_end": 90}, RKV(BUDGET, context_end=90)),
        (140, {"off": 1}, RKV(10_000)),
    ]
    steps = 150
    asks = [
        Ask(token_ids(n, 2), steps, sampling={**EVERYTHING, "extra_args": {f"kvplug.{k}": v for k, v in given.items()}})
        for n, given, _ in cases
    ]
    with tiny_engine(tiny_model_dir, max_num_batched_tokens=60, **rkv()) as llm:
        watch = Watch(llm, integrity=True)
        answers = serve(llm, asks)
        assert_idle(llm)
        with pytest.raises(ValueError, match="has no budget that a request could change: remove kvplug.budget"):
            serve(llm, [Ask(token_ids(20), 4, sampling={"extra_args": {"kvplug.budget": 0.5}})])
    for (_, given, rule), ask, answer in zip(cases, asks, answers, strict=True):
        replay = reference.replay(ask.prompt, rule, steps)
        if "off" not in given:
            check_cuts(replay, watch.snapshots[answer.request_id], 250 if rule.context_end else len(ask.prompt))
        check_logprobs(answer, replay)


def test_preempted_and_aborted_requests(tiny_model_dir: Path, reference: Reference) -> None:
    """Computed again with the answer so far as part of the prompt, which is kept whole until the next cut."""
    limits = {"max_model_len": 512, "num_gpu_blocks_override": 60}
    with tiny_engine(tiny_model_dir, **limits, **rkv()) as llm:
        watch = Watch(llm, snapshots=False, integrity=True)
        asks = [Ask(token_ids(230, seed), 120, arrives=seed) for seed in range(6)]
        asks += [Ask(token_ids(200, 9), 100, aborted=step) for step in (1, 20, 60)]
        answers = serve(llm, asks)
        assert_idle(llm)
    assert any(answer.preemptions for answer in answers), "nothing was preempted"
    for ask, answer in zip(asks, answers, strict=True):
        if not answer.aborted:
            check_segments(reference, RKV(BUDGET), ask.prompt, answer.tokens, watch.admitted[answer.request_id])


def test_a_budget_that_holds_everything_is_stock(tiny_model_dir: Path) -> None:
    prompts = [token_ids(n, 4) for n in (5, 120, 256, 300)]
    with tiny_engine(tiny_model_dir) as llm:
        stock = greedy(llm, prompts, 150)
    with tiny_engine(tiny_model_dir, **rkv(2048)) as llm:
        assert greedy(llm, prompts, 150) == stock
    with tiny_engine(tiny_model_dir, **rkv(64)) as llm:
        assert greedy(llm, prompts, 150) != stock, "nothing was cut: the comparison shows nothing"
