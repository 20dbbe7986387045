"""From a request's first block to its last: shrinking, reuse, preemption, aborts, and engines side by side."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cases import TWO_PIVOTS, Case, heterocache, snapkv, streaming
from engine_tools import (
    KV_HEADS,
    Answer,
    Ask,
    Watch,
    check_kept,
    check_logprobs,
    check_segments,
    greedy,
    one_thread,  # noqa: F401
    serve,
    tiny_engine,
    token_ids,
)
from reference import Full, Reference, SnapKV

from benchmarks.engine import runtime, scheduler, used_blocks

POOL = 64  # blocks, one of them vLLM's null block
SHRINKING = [snapkv(0.5), heterocache("two-pivots", TWO_PIVOTS, 0.6)]
BOUNDED = streaming(380)
PAIR = [token_ids(520, seed) for seed in (1, 2)]  # 33 blocks each: never both in 63 without dropping tokens
PAIR_STEPS = 24
EVERYTHING = {"logprobs": -1}


@pytest.fixture(scope="module")
def reference(tiny_model_dir: Path) -> Reference:
    return Reference(tiny_model_dir)


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


def assert_idle(llm: Any) -> None:
    """Nothing of any request is left."""
    state = runtime(llm)
    assert used_blocks(llm) == 0
    assert not state.live and not state.windows._kept
    assert sorted(state._free_slots) == list(range(state.geometry.max_requests))
    assert int(state.tables._num_free) == state.tables.sizes.chunks
    manager = scheduler(llm)._head_pages
    assert not manager.req_to_blocks and not manager._admitted and not manager.host.used


# ---------------------------------------------------------------------------------------- one small pool


@dataclass
class Together:
    """Two requests at once: per step the blocks in use, the number that run, and how many of them decode."""

    answers: list[Answer] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    decoding: list[int] = field(default_factory=list)


def pair(llm: Any) -> Together:
    result = Together()

    def look() -> None:
        running = list(scheduler(llm).running)
        result.used.append(used_blocks(llm))
        result.running.append(len(running))
        result.decoding.append(sum(r.num_computed_tokens >= r.num_prompt_tokens for r in running))

    result.answers = serve(llm, [Ask(prompt, PAIR_STEPS) for prompt in PAIR], look)
    return result


@dataclass
class Small:
    """What an engine with a pool of 63 blocks made of several runs."""

    case: Case
    plan: Any = None
    lone_used: list[int] = field(default_factory=list)
    lone_rows: list[int] = field(default_factory=list)
    together: Together = field(default_factory=Together)
    pages: list[list[list[int]]] = field(default_factory=list)
    crowd: list[Answer] = field(default_factory=list)
    crowd_ends: list[list[int]] = field(default_factory=list)
    crowd_snapshots: list[list[Any]] = field(default_factory=list)
    schedule: list[Ask] = field(default_factory=list)
    scheduled: list[Answer] = field(default_factory=list)
    schedule_ends: list[list[int]] = field(default_factory=list)
    checked_steps: int = 0
    limit: list[list[int]] = field(default_factory=list)


CROWD = [token_ids(300, seed) for seed in range(5)]
CROWD_STEPS = 110  # 19 blocks each for the prompt; at the end 17 or more each, so that 63 do not do for five
LIMIT = token_ids(POOL * 16 - 17)  # with its one answer token as long as max_model_len, and as the pool


def random_schedule() -> list[Ask]:
    """Short and long requests that come at random, some of them aborted before they end."""
    draw = random.Random(11)
    asks = []
    for seed in range(26):
        arrives = draw.randrange(40)
        length = draw.choice([1, 17, draw.randrange(2, 64), 257, *(draw.randrange(150, 450) for _ in range(4))])
        tokens = draw.randrange(60, 150) if length > 64 else draw.randrange(1, 40)
        aborted = arrives + draw.randrange(30) if seed % 5 == 4 else None
        asks.append(Ask(token_ids(length, 50 + seed), tokens, arrives, aborted))
    return asks


@pytest.fixture(scope="module", params=[BOUNDED, *SHRINKING], ids=lambda case: case.name)
def small(request: pytest.FixtureRequest, tiny_model_dir: Path, profiles: Path) -> Small:
    result = Small(request.param)
    arguments = result.case.arguments(tiny_model_dir, profiles)
    limits = {"num_gpu_blocks_override": POOL, "max_model_len": (POOL - 1) * 16, "max_num_seqs": 12}
    with tiny_engine(tiny_model_dir, **limits, **arguments) as llm:
        watch = Watch(llm, integrity=True, pages=True)
        result.plan = runtime(llm).policy.plan()

        serve(llm, [Ask(PAIR[0], PAIR_STEPS)], lambda: result.lone_used.append(used_blocks(llm)))
        result.together = pair(llm)
        result.pages = watch.pages[result.together.answers[0].request_id][-1]
        assert_idle(llm)

        watch.clear()
        result.crowd = serve(llm, [Ask(prompt, CROWD_STEPS, sampling=EVERYTHING) for prompt in CROWD])
        result.crowd_ends = [watch.admitted[a.request_id] for a in result.crowd]
        result.crowd_snapshots = [watch.snapshots[a.request_id] for a in result.crowd]
        assert_idle(llm)

        watch.clear()
        before = watch.steps
        result.schedule = random_schedule()
        result.scheduled = serve(llm, result.schedule)
        result.schedule_ends = [watch.admitted.get(a.request_id, []) for a in result.scheduled]
        result.checked_steps = watch.steps - before
        assert_idle(llm)

        result.limit = [greedy(llm, [prompt], steps)[0] for prompt, steps in ((LIMIT, 1), (LIMIT[:1], 30))]
        assert_idle(llm)
    return result


@pytest.fixture(scope="module")
def stock_pair(tiny_model_dir: Path) -> Together:
    blocks = (POOL - 1) // 2  # of 32 tokens, the fewest that stock serves on a CPU
    limits = {"num_gpu_blocks_override": blocks + 1, "max_model_len": blocks * 32, "block_size": 32}
    with tiny_engine(tiny_model_dir, **limits) as llm:
        return pair(llm)


def test_blocks_in_use_follow_the_plan(small: Small) -> None:
    """A lone request: prefill blocks by chunk; what decoding needs as soon as the prompt's step is processed."""
    end = len(PAIR[0])
    plan = small.plan
    prefill = [plan.prefill_blocks(n) for n in (256, 512, end)]
    decode = [plan.decode_blocks(end, n) for n in range(end + 1, end + PAIR_STEPS)]
    assert small.lone_used[: len(prefill)] == prefill
    assert small.lone_used[len(prefill) :] == [*decode[:-1], 0]
    if plan.shrinks:
        assert decode[0] < 0.7 * prefill[-1]


def test_freed_blocks_serve_another_request(small: Small, stock_pair: Together) -> None:
    """A pool in which stock vLLM cannot decode both requests at once."""
    assert max(stock_pair.decoding) == 1
    assert [a.preemptions for a in small.together.answers] == [0, 0]
    assert max(small.together.running) == 2 and max(small.together.decoding) == 2
    assert max(small.together.used) <= POOL - 1


def test_pair_equals_reference(small: Small, reference: Reference) -> None:
    for prompt, answer in zip(PAIR, small.together.answers, strict=True):
        assert answer.tokens == reference.replay(prompt, small.case.rule, PAIR_STEPS).tokens


def test_pages_move_between_layers(small: Small) -> None:
    """After shrinking, heads of one layer lie in places of a block that belong to others while prefilling."""
    heads = len(small.pages)
    strangers = [
        page for flat, pages in enumerate(small.pages) for page in pages if page % heads // KV_HEADS != flat // KV_HEADS
    ]
    if small.case.policy == "heterocache":
        assert len(strangers) >= 5
        sizes = {len(pages) for pages in small.pages}
        assert max(sizes) > 2 * min(sizes)
    if small.case.policy == "streaming":
        assert not strangers


def test_resumed_requests_equal_reference(small: Small, reference: Reference) -> None:
    """Requests that were preempted while decoding, already cut down, and computed anew as one prompt."""
    rule = small.case.rule
    resumed = 0
    for prompt, answer, ends, snapshots in zip(
        CROWD, small.crowd, small.crowd_ends, small.crowd_snapshots, strict=True
    ):
        assert len(ends) == 1 + answer.preemptions
        assert len(answer.tokens) == CROWD_STEPS
        if len(ends) == 2 and ends[1] > len(prompt):
            resumed += 1
        if len(ends) > 2:
            check_segments(reference, rule, prompt, answer.tokens, ends)
            continue
        replay = reference.replay(prompt, rule, CROWD_STEPS, resume_at=ends[-1] if len(ends) == 2 else None)
        check_kept(rule, replay, snapshots)
        check_logprobs(answer, replay)
    assert resumed, f"no request was preempted once while decoding: {small.crowd_ends}"


def test_bounded_requests_forget_their_preemption(small: Small, reference: Reference) -> None:
    """Where positions alone decide what is kept, a resumed request goes on as if nothing had happened."""
    if small.case is not BOUNDED:
        pytest.skip("resuming changes what this policy keeps")
    for prompt, answer in zip(CROWD, small.crowd, strict=True):
        if answer.preemptions:
            assert answer.tokens == reference.replay(prompt, BOUNDED.rule, CROWD_STEPS).tokens


def test_random_schedule(small: Small, reference: Reference) -> None:
    """Page tables were checked after every step, and that nothing was left at the end; here: the answers."""
    aborted = [a for a in small.scheduled if a.aborted]
    assert len(small.schedule) >= 20 and len(aborted) >= 3 and small.checked_steps > 100
    assert sum(a.preemptions for a in small.scheduled) > 0
    for i, (ask, answer) in enumerate(zip(small.schedule, small.scheduled, strict=True)):
        if answer.aborted:
            continue
        ends = small.schedule_ends[i]
        assert len(answer.tokens) == ask.tokens and len(ends) == 1 + answer.preemptions
        if answer.preemptions or i % 3 == 0:
            check_segments(reference, small.case.rule, ask.prompt, answer.tokens, ends)


def test_shortest_and_longest_prompt(small: Small, reference: Reference) -> None:
    whole, single = small.limit
    assert whole == reference.replay(LIMIT, small.case.rule, 1).tokens
    assert single == reference.replay(LIMIT[:1], small.case.rule, 30).tokens


# ---------------------------------------------------------------------------------------- sampling parameters


@dataclass
class Sampled:
    """Answers of one engine to the same requests."""

    several: list[Answer]
    greedy: list[int]
    prompt_logprobs: list[Any]
    top: list[dict[int, Any]]
    stopped: list[int]
    one: list[int]


SAMPLED = token_ids(330)
SEEDED = token_ids(120)  # stock vLLM fails on a CPU if it cuts the prompt of a seeded request into chunks


def sample(model_dir: Path, **arguments: Any) -> Sampled:
    with tiny_engine(model_dir, **arguments) as llm:
        seeded = {"n": 2, "temperature": 1.0, "seed": 5}
        several = [serve(llm, [Ask(SEEDED, 20, sampling=seeded)])[0] for _ in range(2)]
        scored = serve(llm, [Ask(SAMPLED, 20, sampling={"logprobs": 3, "prompt_logprobs": 2})])[0]
        stop = {"stop_token_ids": [scored.tokens[6]]}
        first_stop = scored.tokens.index(scored.tokens[6])
        stopped = serve(llm, [Ask(SAMPLED, 20, sampling=stop)])[0]
        assert stopped.outputs[0].finish_reason == "stop"
        assert stopped.tokens == scored.tokens[: first_stop + 1]
        one = greedy(llm, [SAMPLED], 1)[0]
        return Sampled(
            several, scored.tokens, scored.prompt_logprobs or [], scored.outputs[0].logprobs, stopped.tokens, one
        )


@pytest.fixture(scope="module")
def sampled_stock(tiny_model_dir: Path) -> Sampled:
    return sample(tiny_model_dir)


@pytest.mark.parametrize("ratio", [1, 0.3])
def test_sampling_parameters(ratio: float, tiny_model_dir: Path, profiles: Path, sampled_stock: Sampled) -> None:
    ours = sample(tiny_model_dir, **snapkv(ratio).arguments(tiny_model_dir, profiles))
    stock = sampled_stock
    # The prompt is computed with everything in reach, whatever is dropped after it.
    assert len(ours.prompt_logprobs) == len(stock.prompt_logprobs) == len(SAMPLED)
    for mine, theirs in zip(ours.prompt_logprobs[1:], stock.prompt_logprobs[1:], strict=True):
        assert set(mine) == set(theirs)
        assert all(abs(mine[t].logprob - theirs[t].logprob) < 5e-5 for t in mine)
    assert ours.one == stock.one == ours.greedy[:1] == stock.greedy[:1]
    # Two samples of a seeded request: the same again each time, different from each other.
    first, second = ([list(o.token_ids) for o in answer.outputs] for answer in ours.several)
    assert first == second and len(first) == 2 and first[0] != first[1]
    assert len(ours.top) == 20 and all(len(step) >= 3 for step in ours.top)
    for step, token in zip(ours.top, ours.greedy, strict=True):
        assert max(step.values(), key=lambda p: p.logprob) is step[token]
    if ratio == 1:
        assert ours.greedy == stock.greedy and ours.stopped == stock.stopped
        assert first == [list(o.token_ids) for o in stock.several[0].outputs]
    else:
        assert ours.greedy != stock.greedy


# ---------------------------------------------------------------------------------------- the longest request


def test_request_that_fills_max_model_len(tiny_model_dir: Path, profiles: Path, reference: Reference) -> None:
    """Kept tokens fill their pages, so the row rounds up for the prompt and again for the first new token."""
    case = Case("snapkv-64-tokens", "snapkv", {"budget_tokens": 64}, SnapKV(budget_tokens=64))
    prompt = token_ids(497)
    longest = 0
    with tiny_engine(tiny_model_dir, max_model_len=512, **case.arguments(tiny_model_dir, profiles)) as llm:
        watch = Watch(llm, integrity=True)

        def look() -> None:
            nonlocal longest
            longest = max([longest, *(len(row) for row in watch.rows().values())])

        answers = serve(llm, [Ask(prompt, 15, sampling=EVERYTHING)], look)
        assert_idle(llm)
    assert longest == 33  # one more than 512 / 16
    replay = reference.replay(prompt, case.rule, 15)
    check_kept(case.rule, replay, watch.snapshots[answers[0].request_id])
    check_logprobs(answers[0], replay)


# ---------------------------------------------------------------------------------------- engines side by side


NEIGHBOURS = [token_ids(n, 9) for n in (40, 257, 400)]


def neighbours(reference: Reference, case: Case | None) -> list[list[int]]:
    rule = Full() if case is None else case.rule
    return [reference.replay(prompt, rule, 20).tokens for prompt in NEIGHBOURS]


def test_engines_one_after_another(tiny_model_dir: Path, profiles: Path, reference: Reference) -> None:
    """A stock engine before and after a policy, and another policy."""
    for case in (None, snapkv(0.3), None, streaming(64)):
        arguments = {} if case is None else case.arguments(tiny_model_dir, profiles)
        with tiny_engine(tiny_model_dir, **arguments) as llm:
            assert greedy(llm, NEIGHBOURS, 20) == neighbours(reference, case), case


@pytest.fixture
def two_alive(tiny_model_dir: Path, profiles: Path) -> Iterator[tuple[Any, Any]]:
    cases = (snapkv(0.3), streaming(64))
    with tiny_engine(tiny_model_dir, **cases[0].arguments(tiny_model_dir, profiles)) as first:
        try:
            second = tiny_engine(tiny_model_dir, **cases[1].arguments(tiny_model_dir, profiles))
            other = second.__enter__()
        except (RuntimeError, AssertionError) as error:
            pytest.skip(f"this vLLM does not start a second engine in a process: {error}")
        try:
            yield first, other
        finally:
            second.__exit__(None, None, None)


def test_two_engines_alive(two_alive: tuple[Any, Any], reference: Reference) -> None:
    """Two policies take turns in one process, the first before and after the second."""
    first, second = two_alive
    assert runtime(first) is not runtime(second)
    for llm, case in ((first, snapkv(0.3)), (second, streaming(64)), (first, snapkv(0.3))):
        assert greedy(llm, NEIGHBOURS, 20) == neighbours(reference, case), case.name
