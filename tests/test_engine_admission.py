"""Admission in the engine: every token of every head is stored and seen where the reference says, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cases import wgkv
from engine_tools import (
    KV_HEADS,
    LAYERS,
    Ask,
    Snapshot,
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
from reference import Reference, Replay
from reference_gated import WGKV

# Around the window, around pages, ends that make a chunk of one token, several chunks and cuts.
LENGTHS = (1, 31, 33, 50, 257, 300, 511)
STEPS = 140
EVERYTHING = {"logprobs": -1}


CASES: dict[str, dict[str, Any]] = {
    "no-cap": {},
    "odd-window": {"window": 41, "sinks": 3},
    "capped": {"cap": 0.3, "every": 64, "sinks": 2},
    "tight": {"cap": 0.05, "every": 100, "window": 16, "tau": 0.3},
    "deferred": {"sinks": 2, "defer": True},
    "deferred-and-capped": {"cap": 0.3, "every": 64, "window": 41, "defer": True},
    "bounded": {"budget": 40, "every": 64, "voters": 20},
    "bounded-and-capped": {"budget": 16, "cap": 0.3, "every": 2048, "sinks": 3, "window": 41, "voters": 7},
}


@pytest.fixture(scope="module")
def reference(tiny_model_dir: Path) -> Reference:
    return Reference(tiny_model_dir)


@pytest.fixture(scope="module")
def replay_of(reference: Reference, tiny_model_dir: Path):
    """A case is replayed once for several engines."""
    return cache(lambda name, n: reference.replay(token_ids(n), wgkv(tiny_model_dir, **CASES[name]).rule, STEPS))


def check_steps(rule: WGKV, replay: Replay, prompt_end: int, seen: Sequence[Snapshot]) -> None:
    """At every snapshot: what the last cut left, and what came since, if it is in the window or was let through."""
    assert seen
    cuts = {length: kept for length, kept in replay.kept_in_prompt.items()} | replay.watcher.kept
    for snapshot in seen:
        length = snapshot.length
        last = max(cut for cut in cuts if cut <= length)
        for i, layer in enumerate(replay.layers):
            for head, gate in enumerate(layer.gate):
                before = cuts[last][i][head] if last else []
                known = [*before, *range(last, length)]
                safe = {*range(rule.sinks), *(t for start, end in rule.protect for t in range(start, end))}
                stays = [t for t in known if t >= length - rule.window or gate[t] > rule.tau or t in safe]
                assert snapshot.kept[i][head] == stays, f"layer {i} head {head} at {length} of a prompt of {prompt_end}"


@pytest.mark.parametrize("chunk", [256, 2048])
@pytest.mark.parametrize("name", CASES)
def test_steps_equal_reference(name: str, chunk: int, tiny_model_dir: Path, replay_of, tmp_path: Path) -> None:
    """Requests alone, then all in the same batches."""
    case = wgkv(tiny_model_dir, **CASES[name])
    replays = {n: replay_of(name, n) for n in LENGTHS}
    arguments = case.arguments(tiny_model_dir, tmp_path)
    with tiny_engine(tiny_model_dir, max_num_batched_tokens=chunk, **arguments) as llm:
        watch = Watch(llm, integrity=True)
        alone = [serve(llm, [Ask(token_ids(n), STEPS, sampling=EVERYTHING)])[0] for n in LENGTHS]
        asks = [Ask(token_ids(n), STEPS, arrives=i, sampling=EVERYTHING) for i, n in enumerate(LENGTHS)]
        mixed = serve(llm, asks)
        assert scheduler(llm).kv_cache_manager.usage == 0
    for answers in (alone, mixed):
        for length, answer in zip(LENGTHS, answers, strict=True):
            seen = watch.snapshots[answer.request_id]
            check_steps(case.rule, replays[length], length, seen)
            check_logprobs(answer, replays[length])
    longest = LENGTHS[-1]
    stored = sum(len(head) for layer in replays[longest].kept_at_end for head in layer)
    share = stored / (LAYERS * KV_HEADS * (longest + STEPS))
    assert 0.05 < share < 0.9, f"the gate lets {share:.2f} through: it decides nothing"


# Across a page and the window, up to the end, and a last token that is a chunk of its own.
PROTECTED = [(300, ((3, 40), (120, 121))), (511, ((200, 511),)), (257, ((230, 257),))]


@pytest.mark.parametrize("name", CASES)
def test_protected_ranges(name: str, tiny_model_dir: Path, reference: Reference, tmp_path: Path) -> None:
    case = wgkv(tiny_model_dir, **CASES[name])
    rules = [replace(case.rule, protect=ranges) for _, ranges in PROTECTED]
    asks = []
    for i, (n, ranges) in enumerate(PROTECTED):
        extra = {"kvplug.protect": [list(one) for one in ranges]}
        asks.append(Ask(token_ids(n), STEPS, arrives=i, sampling={**EVERYTHING, "extra_args": extra}))
    with tiny_engine(tiny_model_dir, **case.arguments(tiny_model_dir, tmp_path)) as llm:
        watch = Watch(llm, integrity=True)
        answers = serve(llm, asks)
        assert scheduler(llm).kv_cache_manager.usage == 0
    for ask, rule, answer in zip(asks, rules, answers, strict=True):
        replay = reference.replay(ask.prompt, rule, STEPS)
        check_steps(rule, replay, len(ask.prompt), watch.snapshots[answer.request_id])
        check_logprobs(answer, replay)


def test_everything_admitted_is_stock(tiny_model_dir: Path, tmp_path: Path) -> None:
    prompts = [token_ids(n) for n in LENGTHS]
    with tiny_engine(tiny_model_dir) as llm:
        stock = greedy(llm, prompts, 60)
    for fields in ({}, {"budget": 700, "every": 64}):
        case = wgkv(tiny_model_dir, tau=0.0, **fields)
        with tiny_engine(tiny_model_dir, **case.arguments(tiny_model_dir, tmp_path)) as llm:
            assert greedy(llm, prompts, 60) == stock


def test_nothing_admitted_is_a_sliding_window(tiny_model_dir: Path, tmp_path: Path) -> None:
    prompts = [token_ids(n) for n in LENGTHS]
    case = wgkv(tiny_model_dir, tau=1.0, sinks=4)
    with tiny_engine(tiny_model_dir, **case.arguments(tiny_model_dir, tmp_path)) as llm:
        ours = greedy(llm, prompts, 60)
    knobs = {"window": 32, "sinks": 4}
    with tiny_engine(tiny_model_dir, kv_policy="streaming", kv_policy_config=knobs) as llm:
        assert greedy(llm, prompts, 60) == ours


def test_blocks_follow_the_cap(tiny_model_dir: Path, reference: Reference, tmp_path: Path) -> None:
    """A gate that lets everything through, and a cap of a fifth: blocks stay within it, in the prompt too."""
    case = wgkv(tiny_model_dir, tau=0.0, cap=0.2, every=128)
    held: list[int] = []
    with tiny_engine(tiny_model_dir, **case.arguments(tiny_model_dir, tmp_path)) as llm:
        manager = scheduler(llm)._head_pages

        def look() -> None:
            held.extend(sum(not b.is_null for b in row) for row in manager.req_to_blocks.values())

        (answer,) = serve(llm, [Ask(token_ids(1500), 140)], look)
    assert answer.tokens == reference.replay(token_ids(1500), case.rule, 140).tokens
    bound = (32 + 0.2 * 1640 + 128) / 16 + 2
    assert max(held) <= bound < 0.4 * 1500 / 16


def test_blocks_follow_the_budget(tiny_model_dir: Path, reference: Reference, tmp_path: Path) -> None:
    """An answer may be as long as it likes."""
    case = wgkv(tiny_model_dir, tau=0.0, budget=50, every=64)
    held: list[int] = []
    with tiny_engine(tiny_model_dir, **case.arguments(tiny_model_dir, tmp_path)) as llm:
        manager = scheduler(llm)._head_pages

        def look() -> None:
            held.extend(sum(not b.is_null for b in row) for row in manager.req_to_blocks.values())

        (answer,) = serve(llm, [Ask(token_ids(300), 500)], look)
    assert answer.tokens == reference.replay(token_ids(300), case.rule, 500).tokens
    assert max(held) <= (32 + 50 + 128) / 16 + 2 < 0.5 * 800 / 16


def test_preempted_requests(tiny_model_dir: Path, reference: Reference, tmp_path: Path) -> None:
    """Where no cap intervenes they continue with the tokens of an undisturbed run; with one, as the reference does."""
    for fields, pool in (({}, 90), ({"cap": 0.3, "every": 100}, 50), ({"budget": 40, "every": 64}, 36)):
        case = wgkv(tiny_model_dir, **fields)
        limits = {"num_gpu_blocks_override": pool, "max_model_len": 768}
        with tiny_engine(tiny_model_dir, **limits, **case.arguments(tiny_model_dir, tmp_path)) as llm:
            watch = Watch(llm, snapshots=False, integrity=True)
            asks = [Ask(token_ids(330 + i, i), 150) for i in range(4)]
            answers = serve(llm, asks)
            assert scheduler(llm).kv_cache_manager.usage == 0
        assert sum(answer.preemptions for answer in answers) > 0, fields
        for ask, answer in zip(asks, answers, strict=True):
            check_segments(reference, case.rule, ask.prompt, answer.tokens, watch.admitted[answer.request_id])
            if not fields:
                assert answer.tokens == reference.replay(ask.prompt, case.rule, 150).tokens
