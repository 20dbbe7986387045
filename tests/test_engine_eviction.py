"""Eviction while requests decode: what every head stores after each cut, as the reference, and within the budget."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import fastkvzip
from engine_tools import (
    Ask,
    Watch,
    check_logprobs,
    check_segments,
    one_thread,  # noqa: F401
    scheduler,
    serve,
    tiny_engine,
    token_ids,
)
from reference import Reference

BUDGET = 256
HEADS = 6
EVERYTHING = {"logprobs": -1}


@pytest.fixture(scope="module")
def reference(tiny_model_dir: Path) -> Reference:
    return Reference(tiny_model_dir)


def assert_idle(llm) -> None:
    state, manager = scheduler(llm), scheduler(llm)._head_pages
    assert state.kv_cache_manager.usage == 0 and not manager.req_to_blocks and not manager._admitted


@pytest.mark.parametrize("prompt, steps, ratio", [(500, 1000, 0.4), (700, 140, 1.0), (127, 400, 1.0), (257, 260, 0.6)])
def test_cuts_equal_reference(
    prompt: int, steps: int, ratio: float, tiny_model_dir: Path, reference: Reference, tmp_path: Path
) -> None:
    """A prompt below the budget, one that fills it, one that is over it when decoding begins."""
    case = fastkvzip(ratio, 40, 200, decode_budget=BUDGET)
    with tiny_engine(tiny_model_dir, **case.arguments(tiny_model_dir, tmp_path)) as llm:
        watch = Watch(llm, integrity=True)
        blocks = []
        manager = scheduler(llm)._head_pages

        def look() -> None:
            blocks.extend(sum(not b.is_null for b in row) for row in manager.req_to_blocks.values())

        (answer,) = serve(llm, [Ask(token_ids(prompt), steps, sampling=EVERYTHING)], look)
        assert_idle(llm)
    replay = reference.replay(token_ids(prompt), case.rule, steps)
    seen = [s for s in watch.snapshots[answer.request_id] if s.length > prompt]
    assert len(seen) >= steps - 1 and replay.watcher.kept
    for snapshot in seen:
        expected = replay.watcher.kept.get(snapshot.length, replay.kept[snapshot.length])
        assert snapshot.kept == expected, snapshot.length
        if snapshot.length >= (prompt // 128 + 1) * 128:
            assert sum(len(head) for layer in snapshot.kept for head in layer) <= (BUDGET + 128) * HEADS
    check_logprobs(answer, replay)
    lengths = {len(head) for layer in seen[-1].kept for head in layer}
    assert steps < 300 or len(lengths) > 1, "every head stores the same: nothing was shared"
    assert steps < 300 or max(blocks[-200:]) <= (BUDGET + 128) // 16 + 2


def test_preempted_requests(tiny_model_dir: Path, reference: Reference, tmp_path: Path) -> None:
    """A pool too small for four: those that were preempted go on as the reference that resumes the same way."""
    case = fastkvzip(0.8, 40, 200, decode_budget=BUDGET)
    limits = {"num_gpu_blocks_override": 80, "max_model_len": 1024}
    with tiny_engine(tiny_model_dir, **limits, **case.arguments(tiny_model_dir, tmp_path)) as llm:
        watch = Watch(llm, snapshots=False, integrity=True)
        asks = [Ask(token_ids(330 + i, i), 200) for i in range(4)]
        answers = serve(llm, asks)
        assert_idle(llm)
    assert sum(answer.preemptions for answer in answers) > 0
    for ask, answer in zip(asks, answers, strict=True):
        check_segments(reference, case.rule, ask.prompt, answer.tokens, watch.admitted[answer.request_id])
