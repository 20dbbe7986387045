"""Admission and selection in one engine: what heads store, and what of it every query attends to, as the reference."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import wgkv
from engine_tools import (
    Ask,
    Watch,
    check_logprobs,
    check_segments,
    greedy,
    one_thread,  # noqa: F401
    runtime,
    serve,
    tiny_engine,
    token_ids,
)
from option_tools import EVERYTHING, assert_idle
from reference import Positions, Reference
from test_engine_admission import check_steps

# Within the window, around its end and pages, chunks of one token, several chunks and cuts.
LENGTHS = (20, 33, 90, 257, 300, 511)
STEPS = 70  # four pages are promoted

CASES: dict[str, dict[str, Any]] = {
    "three-pages": {"budget_tokens": 80},
    "one-page": {"budget_tokens": 48, "sinks": 3},
    "capped": {"budget_tokens": 64, "cap": 0.3, "every": 64, "sinks": 2},
    "deferred": {"budget_tokens": 70, "window": 48, "defer": True},
}


@pytest.fixture(scope="module")
def reference(tiny_model_dir: Path) -> Reference:
    return Reference(tiny_model_dir)


@pytest.fixture(scope="module")
def replay_of(reference: Reference, tiny_model_dir: Path):
    """A case is replayed once for several engines."""
    return cache(lambda name, n: reference.replay(token_ids(n), wgkv(tiny_model_dir, **CASES[name]).rule, STEPS))


class Seen:
    """Looks at what every decode query attends to, and at the bounds of all pages behind the window after each step.

    attended: by request and its length, the positions in every layer and head; nothing where all of them are.
    """

    def __init__(self, llm: Any):
        self.runtime, self.selector = runtime(llm), runtime(llm).page_selector
        self.attended: dict[str, dict[int, Positions]] = {}
        self.checked = 0
        self._select, self._end_step = self.selector.select, self.runtime.end_step
        self.selector.select, self.runtime.end_step = self.select, self.end_step

    def select(self, row_slot: Any, layer: int, query: Any) -> Any:
        found = self._select(row_slot, layer, query)
        if found is not None:
            position = self.selector.tables.positions
            lengths = dict(zip(row_slot.tolist(), (self.runtime._position[: len(row_slot)] + 1).tolist(), strict=True))
            for name, live in self.runtime.live.items():
                if live.slot in lengths:
                    row = row_slot.tolist().index(live.slot)
                    heads = [
                        position[found.chunks[found.directory[row, h].long()].flatten().long()].flatten()[:count]
                        for h, count in enumerate(found.lengths[row].tolist())
                    ]
                    of_request = self.attended.setdefault(name, {})
                    of_request.setdefault(lengths[live.slot], []).append([sorted(head.tolist()) for head in heads])
        return found

    def end_step(self) -> None:
        self._end_step()
        tables, pages = self.runtime.tables, self.runtime.pool.pages
        window = self.selector.local_pages
        for live in self.runtime.live.values():
            for head, length in enumerate(tables.lengths[live.slot].tolist()):
                for number in range(window, -(-length // 16)):
                    page = int(tables.locate(live.slot, head, torch.tensor(16 * number))) // 16
                    keys = pages[page, : length - 16 * number, : pages.shape[-1] // 2]
                    low, high = self.selector.bounds[page]
                    assert low.equal(keys.amin(0)) and high.equal(keys.amax(0)), (live.slot, head, number)
                    self.checked += 1


def size(positions: Positions) -> int:
    return sum(len(head) for layer in positions for head in layer)


@pytest.mark.parametrize("chunk", [100, 2048])
@pytest.mark.parametrize("name", CASES)
def test_steps_equal_reference(name: str, chunk: int, tiny_model_dir: Path, replay_of, tmp_path: Path) -> None:
    """Requests alone, then all in the same batches."""
    case = wgkv(tiny_model_dir, **CASES[name])
    arguments = case.arguments(tiny_model_dir, tmp_path)
    with tiny_engine(tiny_model_dir, max_num_batched_tokens=chunk, **arguments) as llm:
        watch, seen = Watch(llm, integrity=True), Seen(llm)
        alone = [serve(llm, [Ask(token_ids(n), STEPS, sampling=EVERYTHING)])[0] for n in LENGTHS[-2:]]
        asks = [Ask(token_ids(n), STEPS, arrives=i, sampling=EVERYTHING) for i, n in enumerate(LENGTHS)]
        mixed = serve(llm, asks)
        assert_idle(llm)
    assert seen.checked
    for length, answer in zip((*LENGTHS[-2:], *LENGTHS), (*alone, *mixed), strict=True):
        replay = replay_of(name, length)
        check_steps(case.rule, replay, length, watch.snapshots[answer.request_id])
        check_logprobs(answer, replay)
        for at, found in seen.attended.get(answer.request_id, {}).items():
            if at > length:  # the prompt attends to all that is stored
                assert found == replay.kept[at], at
    longest = seen.attended[alone[-1].request_id]
    assert len(longest) == STEPS - 1
    stored = {s.length: s.kept for s in watch.snapshots[alone[-1].request_id]}
    share = min(size(found) / size(stored[at]) for at, found in longest.items())
    assert share < 0.7, "queries attend to nearly everything: selection decides nothing"


def test_protected_tokens_are_candidates(tiny_model_dir: Path, reference: Reference, tmp_path: Path) -> None:
    """They are stored whatever the gate says; which queries attend to them their pages' bounds decide."""
    case = wgkv(tiny_model_dir, budget_tokens=64, protect=((3, 40), (120, 257)))
    extra = {"kvplug.protect": [[3, 40], [120, 257]]}
    with tiny_engine(tiny_model_dir, **case.arguments(tiny_model_dir, tmp_path)) as llm:
        (answer,) = serve(llm, [Ask(token_ids(257), 60, sampling={**EVERYTHING, "extra_args": extra})])
    check_logprobs(answer, reference.replay(token_ids(257), case.rule, 60))


def test_preempted_requests(tiny_model_dir: Path, reference: Reference, tmp_path: Path) -> None:
    """And aborted ones. Bounds of pages that change hands are checked in every step."""
    for fields, pool in (({}, 90), ({"cap": 0.3, "every": 100}, 50)):
        case = wgkv(tiny_model_dir, budget_tokens=80, **fields)
        limits = {"num_gpu_blocks_override": pool, "max_model_len": 768}
        with tiny_engine(tiny_model_dir, **limits, **case.arguments(tiny_model_dir, tmp_path)) as llm:
            watch, seen = Watch(llm, snapshots=False, integrity=True), Seen(llm)
            asks = [Ask(token_ids(330 + i, i), 120) for i in range(4)]
            answers = serve(llm, [*asks, *(Ask(token_ids(200, 9), 60, aborted=step) for step in (1, 20))])[: len(asks)]
            assert_idle(llm)
        assert seen.checked and sum(answer.preemptions for answer in answers) > 0, fields
        for ask, answer in zip(asks, answers, strict=True):
            check_segments(reference, case.rule, ask.prompt, answer.tokens, watch.admitted[answer.request_id])


def test_budgets_that_hold_everything(tiny_model_dir: Path, tmp_path: Path) -> None:
    """The tokens of plain wgkv if the budget holds what was admitted, and stock vLLM's if all of it was."""
    prompts = [token_ids(n, 4) for n in (5, 120, 256, 300)]
    tokens = {}
    for budget in (None, 352, 64):
        case = wgkv(tiny_model_dir, **({} if budget is None else {"budget_tokens": budget}))
        with tiny_engine(tiny_model_dir, **case.arguments(tiny_model_dir, tmp_path)) as llm:
            tokens[budget] = greedy(llm, prompts, 50)
    assert tokens[352] == tokens[None]
    assert tokens[64] != tokens[None], "nothing was left out: the comparison shows nothing"
    with tiny_engine(tiny_model_dir) as llm:
        stock = greedy(llm, prompts, 50)
    case = wgkv(tiny_model_dir, tau=0.0, budget_tokens=352)
    with tiny_engine(tiny_model_dir, **case.arguments(tiny_model_dir, tmp_path)) as llm:
        assert greedy(llm, prompts, 50) == stock
