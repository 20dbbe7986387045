"""Eviction while requests decode: what every head stores after each cut, as the reference, and within the budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case, fastkvzip, fastkvzip_yakv, knorm
from engine_tools import (
    Ask,
    Watch,
    check_logprobs,
    check_segments,
    one_thread,  # noqa: F401
    runtime,
    scheduler,
    serve,
    tiny_engine,
    token_ids,
)
from reference import Reference
from reference_gated import FastKVzip

from vllm_kvplug.options import OptionError

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


def test_what_follows_a_context_is_evicted_like_an_answer(
    tiny_model_dir: Path, reference: Reference, tmp_path: Path
) -> None:
    """A question of several chunks, cut at multiples of 128 tokens as it comes in, in one batch with others."""
    case = fastkvzip(0.8, 40, 200, decode_budget=BUDGET)
    given = {f.name: getattr(case.rule, f.name) for f in fields(case.rule)}
    asked = [(900, 300), (700, 512), (400, 399), (300, 1)]
    asks = [
        Ask(token_ids(n, 2), 140, sampling={**EVERYTHING, "extra_args": {"kvplug.context_end": end}})
        for n, end in asked
    ]
    with tiny_engine(tiny_model_dir, **case.arguments(tiny_model_dir, tmp_path)) as llm:
        watch = Watch(llm, integrity=True)
        answers = serve(llm, asks)
        assert_idle(llm)
    for (n, end), answer in zip(asked, answers, strict=True):
        replay = reference.replay(token_ids(n, 2), Protecting(**given, context_end=end), 140)
        seen = [s for s in watch.snapshots[answer.request_id] if s.length > end]
        assert {length for length in replay.watcher.kept if length < n} <= {s.length for s in seen}
        for snapshot in seen:
            expected = replay.watcher.kept.get(snapshot.length, replay.kept[snapshot.length])
            assert snapshot.kept == expected, snapshot.length
        check_logprobs(answer, replay)


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


@pytest.mark.parametrize(
    "case, more",
    [
        (knorm(0.01, 1, 16), ()),  # the share is 0: of every prompt its last token
        (knorm(0.3, 5, 17), ()),  # cuts that do not lie at full pages
        (fastkvzip(0.4, 40, 200, decode_budget=BUDGET), (256, 384)),  # a prompt ends where answers are cut
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_lengths_around_cuts(
    case: Any, more: tuple[int, ...], tiny_model_dir: Path, reference: Reference, tmp_path: Path
) -> None:
    """Prompts of a few tokens, at cuts and beside them, with answers of one token and of more."""
    lengths, answer = [1, 2, 3, 16, 17, 33, 49, 130, *more], 140 if more else 9
    asks = [Ask(token_ids(n, 1), t, i, sampling=EVERYTHING) for n in lengths for i, t in enumerate((1, answer))]
    with tiny_engine(tiny_model_dir, **case.arguments(tiny_model_dir, tmp_path)) as llm:
        watch = Watch(llm, integrity=True)
        answers = serve(llm, asks)
        assert_idle(llm)
        manager = scheduler(llm)._head_pages
        entries = manager.kv_cache_spec.max_num_blocks_per_req(scheduler(llm).vllm_config, 2048)
        assert entries == manager.policy.plan().most_entries(2048)
    for ask, found in zip(asks, answers, strict=True):
        replay = reference.replay(ask.prompt, case.rule, ask.tokens)
        check_logprobs(found, replay)
        cut = [s for s in watch.snapshots[found.request_id] if s.length in replay.kept_in_prompt]
        assert cut and all(s.kept == replay.kept_in_prompt[s.length] for s in cut)


@pytest.mark.parametrize(
    "case", [fastkvzip(0.4, 8, 257), fastkvzip_yakv(0.2, 0.4, 8, 257, codec="auto")], ids=lambda case: case.policy
)
def test_the_gate_rests_where_no_score_is_looked_at(
    case: Case, tiny_model_dir: Path, reference: Reference, tmp_path: Path
) -> None:
    """Prompts come in 256 tokens at a time and are cut every 257, so that there are steps of one token alone: some
    whose score a cut needs, and some inside the window or of answers. What Python does tells them apart here, and
    `_is_uniform_decode`, where it answers yes, which of them a captured graph would run.
    """
    chunks = {515: [256, 1, 256, 1, 1], 700: [256, 1, 256, 1, 186]}
    asked = {515: [True, True, True, False, False], 700: [True] * 5}
    with tiny_engine(tiny_model_dir, **case.arguments(tiny_model_dir, tmp_path)) as llm:
        watch, state = Watch(llm, integrity=True), runtime(llm)
        scored, projected, decodes = [], [], []
        score, is_uniform, end_step = state.gate.score, state.runner._is_uniform_decode, state.end_step

        def scoring(layer: int, key: torch.Tensor, *more: Any) -> torch.Tensor:
            scored.extend([len(key)] if layer == 0 else [])
            return score(layer, key, *more)

        def deciding(**given: Any) -> bool:
            decodes.append(is_uniform(**given))
            return decodes[-1]

        def ending() -> None:
            if state.live:  # an empty step tells of requests' ends
                projected.append(not state.projected.isnan().all())
            state.projected.fill_(torch.nan)
            end_step()

        state.gate.score, state.runner._is_uniform_decode, state.end_step = scoring, deciding, ending
        state.projected.fill_(torch.nan)
        found = [serve(llm, [Ask(token_ids(n, n), 6, sampling=EVERYTHING)])[0] for n in chunks]
        assert_idle(llm)
    assert projected == [*asked[515], *[False] * 5, *asked[700], *[False] * 5]
    assert decodes == [not yes for yes in projected]
    assert scored == [*chunks[515][:3], *chunks[700]]
    for n, answer in zip(chunks, found, strict=True):
        replay = reference.replay(token_ids(n, n), case.rule, 6)
        check_logprobs(answer, replay)
        if case.policy == "fastkvzip":
            cut = [s for s in watch.snapshots[answer.request_id] if s.length in replay.kept_in_prompt]
            assert len(cut) == 3 and all(s.kept == replay.kept_in_prompt[s.length] for s in cut)


@dataclass(frozen=True)
class Protecting(FastKVzip):
    protect: tuple[tuple[int, int], ...] = ()
    context_end: int | None = None


PROTECTED = [
    (200, ((0, 64),)),  # two whole cuts
    (200, ((32, 96), (100, 200))),
    (201, ((0, 201),)),
    (300, ((0, 300),)),  # more than decode_budget
    (65, ((30, 34), (63, 65))),  # across a cut, and the window
]


def test_protected_ranges(tiny_model_dir: Path, reference: Reference, tmp_path: Path) -> None:
    case = fastkvzip(0.2, 8, 32, share=0.0, decode_budget=BUDGET)

    def sampling(ranges: tuple[tuple[int, int], ...]) -> Mapping[str, Any]:
        return {**EVERYTHING, "extra_args": {"kvplug.protect": [list(one) for one in ranges]}}

    with tiny_engine(tiny_model_dir, **case.arguments(tiny_model_dir, tmp_path)) as llm:
        watch = Watch(llm, snapshots=False, integrity=True)
        answers = serve(llm, [Ask(token_ids(n, 2), 150, sampling=sampling(ranges)) for n, ranges in PROTECTED])
        assert_idle(llm)
        assert watch.admitted.keys() == {answer.request_id for answer in answers}
    given = {f.name: getattr(case.rule, f.name) for f in fields(case.rule)}
    for (n, ranges), answer in zip(PROTECTED, answers, strict=True):
        check_logprobs(answer, reference.replay(token_ids(n, 2), Protecting(**given, protect=ranges), 150))


def test_aborts_at_cuts_and_a_pool_that_options_could_exceed(
    tiny_model_dir: Path, reference: Reference, tmp_path: Path
) -> None:
    """The pool holds every request of the server's budget, and not a dense one of 1,000 tokens: that is refused."""
    case = fastkvzip(0.4, 40, 100, decode_budget=BUDGET)
    limits = {"max_num_batched_tokens": 100, "num_gpu_blocks_override": 60}
    with tiny_engine(tiny_model_dir, **limits, **case.arguments(tiny_model_dir, tmp_path)) as llm:
        for extra in ({"kvplug.off": True}, {"kvplug.budget": 1}, {"kvplug.protect": [0, 990]}):
            with pytest.raises(OptionError, match="blocks of the KV cache, which has 59: lower max_tokens"):
                serve(llm, [Ask(token_ids(1000), 20, sampling={"extra_args": extra})])
        Watch(llm, snapshots=False, integrity=True)
        asks = [Ask(token_ids(350, i), 200, aborted=i) for i in range(1, 7)]  # at cuts of the prompt, and behind
        asks += [Ask(token_ids(250, i), 150, 0, aborted=step) for i, step in enumerate(range(7, 12))]
        asks += [Ask(token_ids(300, 9), 100, sampling=EVERYTHING)]
        answers = serve(llm, asks)
        assert_idle(llm)
    check_logprobs(answers[-1], reference.replay(asks[-1].prompt, case.rule, 100))


def test_a_seed_that_would_end_the_engine_is_refused(tiny_model_dir: Path) -> None:
    """vLLM's CPU runner cannot take up a seed once a part of the prompt is computed."""
    with tiny_engine(tiny_model_dir, kv_policy="knorm", kv_policy_config={"cut_every": 64}) as llm:
        (short,) = serve(llm, [Ask(token_ids(64), 4, sampling={"temperature": 1.0, "seed": 1})])
        assert len(short.tokens) == 4
        with pytest.raises(ValueError, match="remove seed, or raise cut_every"):
            serve(llm, [Ask(token_ids(65), 4, sampling={"temperature": 1.0, "seed": 1})])
        marked = {"temperature": 1.0, "seed": 1, "extra_args": {"kvplug.context_end": 20}}
        with pytest.raises(ValueError, match="remove seed, or raise kvplug.context_end"):
            serve(llm, [Ask(token_ids(64), 4, sampling=marked)])
        assert_idle(llm)
