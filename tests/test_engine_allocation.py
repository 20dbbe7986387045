"""Budgets that layers or single heads have for themselves: kept sets and distributions are the reference's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from cases import Case, fastkvzip, knorm
from engine_tools import (
    Ask,
    Snapshot,
    Watch,
    check_kept,
    check_logprobs,
    one_thread,  # noqa: F401
    serve,
    tiny_engine,
    token_ids,
)
from reference import Reference
from reference_gated import FastKVzip

BUDGET = 256
LENGTHS = (1, 5, 63, 65, 257, 300, 513, 700)
STEPS = 18
ALLOCATIONS = ("layer", "uniform")
EVERYTHING = {"logprobs": -1}


@pytest.fixture(scope="module")
def reference(tiny_model_dir: Path) -> Reference:
    return Reference(tiny_model_dir)


def check_even(allocation: str, snapshot: Snapshot) -> None:
    """Layers, or heads, store the same number of tokens; where they do not divide, earlier ones one more."""
    heads = [[len(head) for head in layer] for layer in snapshot.kept]
    totals = [sum(layer) for layer in heads] if allocation == "layer" else sum(heads, [])
    assert totals == sorted(totals, reverse=True) and totals[0] - totals[-1] <= 1


@pytest.mark.parametrize("chunk", [256, 512, 2048])
@pytest.mark.parametrize(
    "case",
    [case for one in ALLOCATIONS for case in (knorm(0.3, 16, 64, one), fastkvzip(0.3, 40, 128, allocation=one))],
    ids=lambda case: case.name,
)
def test_prompts_equal_reference(
    case: Case, chunk: int, tiny_model_dir: Path, reference: Reference, tmp_path: Path
) -> None:
    """Alone and in one batch, where chunks end elsewhere."""
    asks = [Ask(token_ids(n), STEPS, arrives=i, sampling=EVERYTHING) for i, n in enumerate(LENGTHS)]
    with tiny_engine(tiny_model_dir, max_num_batched_tokens=chunk, **case.arguments(tiny_model_dir, tmp_path)) as llm:
        watch = Watch(llm, integrity=True)
        answers = serve(llm, asks)
        answers += [serve(llm, [ask])[0] for ask in asks]
    replays = [reference.replay(ask.prompt, case.rule, STEPS) for ask in asks]
    for replay, answer in zip(replays * 2, answers, strict=True):
        snapshots = watch.snapshots[answer.request_id]
        check_kept(case.rule, replay, snapshots)
        check_logprobs(answer, replay)
        check_even(case.rule.allocation, snapshots[-1])
    assert any(len(head) < 700 for layer in snapshots[-1].kept for head in layer)
    assert case.rule.allocation == "uniform" or len({len(head) for head in snapshots[-1].kept[0]}) > 1


@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_answers_equal_reference(allocation: str, tiny_model_dir: Path, reference: Reference, tmp_path: Path) -> None:
    """Prompts below the budget, ones that fill it, and ones that are over it when decoding begins."""
    case = fastkvzip(0.5, 40, 200, decode_budget=BUDGET, allocation=allocation)
    asks = [Ask(token_ids(n), steps, sampling=EVERYTHING) for n, steps in ((500, 400), (127, 300), (700, 140))]
    with tiny_engine(tiny_model_dir, **case.arguments(tiny_model_dir, tmp_path)) as llm:
        watch = Watch(llm, integrity=True)
        answers = [serve(llm, [ask])[0] for ask in asks]  # in a batch one score rounds to the other side of another
    for ask, answer in zip(asks, answers, strict=True):
        replay = reference.replay(ask.prompt, case.rule, ask.tokens)
        seen = [s for s in watch.snapshots[answer.request_id] if s.length > len(ask.prompt)]
        for snapshot in seen:
            expected = replay.watcher.kept.get(snapshot.length, replay.kept[snapshot.length])
            assert snapshot.kept == expected, snapshot.length
            check_even(allocation, snapshot)
        assert len(seen) >= ask.tokens - 1 and replay.watcher.kept
        check_logprobs(answer, replay)


@dataclass(frozen=True)
class Protecting(FastKVzip):
    protect: tuple[tuple[int, int], ...] = ()


PROTECTED = [
    (200, ((0, 64),)),  # two whole cuts
    (200, ((32, 96), (100, 200))),
    (300, ((0, 300),)),  # more than decode_budget
    (65, ((30, 34), (63, 65))),  # across a cut, and the window
]


@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_protected_ranges(allocation: str, tiny_model_dir: Path, reference: Reference, tmp_path: Path) -> None:
    case = fastkvzip(0.2, 8, 32, share=0.0, decode_budget=BUDGET, allocation=allocation)

    def sampling(ranges: tuple[tuple[int, int], ...]) -> Mapping[str, Any]:
        return {**EVERYTHING, "extra_args": {"kvplug.protect": [list(one) for one in ranges]}}

    with tiny_engine(tiny_model_dir, **case.arguments(tiny_model_dir, tmp_path)) as llm:
        watch = Watch(llm, integrity=True)
        answers = serve(llm, [Ask(token_ids(n, 2), 150, sampling=sampling(ranges)) for n, ranges in PROTECTED])
    given = {f.name: getattr(case.rule, f.name) for f in fields(case.rule)}
    for (n, ranges), answer in zip(PROTECTED, answers, strict=True):
        replay = reference.replay(token_ids(n, 2), Protecting(**given, protect=ranges), 150)
        check_logprobs(answer, replay)
        cut = [s for s in watch.snapshots[answer.request_id] if s.length in replay.kept_in_prompt]
        assert cut and all(s.kept == replay.kept_in_prompt[s.length] for s in cut)
