"""Requests with options of their own in one batch: each as the reference serves it alone, and nothing left of any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from drift_tools import check_steps, knobs, rule
from engine_tools import (
    Answer,
    Ask,
    Watch,
    check_kept,
    check_logprobs,
    check_segments,
    counting,
    equal_up_to_ties,
    greedy,
    one_thread,  # noqa: F401
    runtime,
    scheduler,
    serve,
    tiny_engine,
    token_ids,
)
from option_tools import EVERYTHING, KNORM_KNOBS, SNAPKV_KNOBS, Member, assert_idle, knorm, snapkv
from reference import Full, Reference
from reference_drift import HeteroCacheDrift

from benchmarks.drift_model import make_model, write_profile

POOL = 96  # blocks, one of them vLLM's null block
STEPS = 33  # six drift windows of five queries and a part of one
CROWD_STEPS = 110

SNAPKV = [
    Member(180, {}, snapkv()),
    Member(190, {"budget": 0.1}, snapkv(ratio=0.1)),
    Member(200, {"budget": "0.75"}, snapkv(ratio=0.75)),
    Member(150, {"budget": 1}, snapkv(ratio=1.0)),
    Member(257, {"protect": [[100, 120], [3, 30], [25, 40]]}, snapkv(protect=((3, 40), (100, 120)))),
    Member(220, {"protect": [50, 170], "budget": 0.05}, snapkv(ratio=0.05, protect=((50, 170),))),
    Member(160, {"protect": "[0, 16]", "off": 0}, snapkv(protect=((0, 16),))),
    Member(170, {"off": True}, Full()),
]
SNAPKV_CROWD = [
    Member(300, {"off": True}, Full()),
    Member(301, {"budget": 0.9}, snapkv(ratio=0.9)),
    Member(302, {}, snapkv()),
    Member(303, {"protect": [10, 260]}, snapkv(protect=((10, 260),))),
    Member(304, {"budget": 0.2, "protect": [7, 9]}, snapkv(ratio=0.2, protect=((7, 9),))),
    Member(305, {"off": "true"}, Full()),
    Member(306, {"budget": 0.8}, snapkv(ratio=0.8)),
]
KNORM = [
    Member(180, {}, knorm()),
    Member(190, {"budget": 0.05}, knorm(ratio=0.05)),  # less than the window
    Member(150, {"budget": 1}, knorm(ratio=1.0)),
    Member(257, {"protect": [[100, 120], [3, 30], [25, 40]]}, knorm(protect=((3, 40), (100, 120)))),
    Member(220, {"protect": [50, 170], "budget": 0.1}, knorm(ratio=0.1, protect=((50, 170),))),
    Member(160, {"protect": "[0, 16, 150, 160]"}, knorm(protect=((0, 16), (150, 160)))),
    Member(170, {"off": True}, Full()),
]
KNORM_CROWD = [
    Member(300, {"off": True}, Full()),
    Member(301, {"budget": 0.9}, knorm(ratio=0.9)),
    Member(302, {}, knorm()),
    Member(303, {"protect": [10, 260]}, knorm(protect=((10, 260),))),
    Member(304, {"budget": 0.2, "protect": [7, 9]}, knorm(ratio=0.2, protect=((7, 9),))),
    Member(305, {"off": "true"}, Full()),
    Member(306, {"budget": 0.8}, knorm(ratio=0.8)),
]
HETEROCACHE = [
    Member(300, {}, rule()),
    Member(280, {"budget": 0.75}, rule(rho=0.75)),
    Member(257, {"protect": [[200, 240], [10, 30]]}, rule(protect=((10, 30), (200, 240)))),
    Member(290, {"protect": [20, 220]}, rule(protect=((20, 220),))),
    Member(270, {"budget": 0.5, "protect": [0, 16, 262, 270]}, rule(rho=0.5, protect=((0, 16), (262, 270)))),
    Member(240, {"off": 1}, Full()),
]
HETEROCACHE_CROWD = [
    Member(300, {"off": True}, Full()),
    Member(301, {"budget": 0.9}, rule(rho=0.9)),
    Member(302, {}, rule()),
    Member(303, {"protect": [10, 200]}, rule(protect=((10, 200),))),
    Member(304, {"budget": 0.55, "protect": [7, 9]}, rule(rho=0.55, protect=((7, 9),))),
]
RELEASED = [Member(300, {"protect": [180, 240]}, rule(released=True, protect=((180, 240),)))]


@dataclass
class Batch:
    """What an engine with a pool of 95 blocks made of the members, and of a crowd that does not fit."""

    members: Sequence[Member]
    crowd: Sequence[Member]
    reference: Reference
    stock: list[list[int]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    snapshots: list[list[Any]] = field(default_factory=list)
    decoding: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    crowd_answers: list[Answer] = field(default_factory=list)
    crowd_ends: list[list[int]] = field(default_factory=list)
    twins: list[list[Any]] = field(default_factory=list)


@pytest.fixture(scope="module")
def drift_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("drift"))


@pytest.fixture(scope="module")
def profile(drift_model: Path) -> Path:
    return write_profile(drift_model, drift_model.parent / "profile.json")


@pytest.fixture(scope="module", params=["snapkv", "knorm", "heterocache"])
def batch(request: pytest.FixtureRequest) -> Batch:
    if request.param == "snapkv":
        members, crowd, model = SNAPKV, SNAPKV_CROWD, request.getfixturevalue("tiny_model_dir")
        policy = {"kv_policy": "snapkv", "kv_policy_config": SNAPKV_KNOBS}
    elif request.param == "knorm":
        members, crowd, model = KNORM, KNORM_CROWD, request.getfixturevalue("tiny_model_dir")
        policy = {"kv_policy": "knorm", "kv_policy_config": KNORM_KNOBS}
    else:
        members, crowd, model = HETEROCACHE, HETEROCACHE_CROWD, request.getfixturevalue("drift_model")
        profile = request.getfixturevalue("profile")
        policy = {"kv_policy": "heterocache", "kv_policy_config": knobs(profile, rule())}
    result = Batch(members, crowd, Reference(model))
    limits = {"max_model_len": 512}
    with tiny_engine(model, **limits) as llm:
        result.stock = greedy(llm, [m.prompt for m in members], STEPS)
    with tiny_engine(model, num_gpu_blocks_override=POOL, **limits, **policy) as llm:
        watch, counts = Watch(llm, integrity=True), counting(llm)

        def look() -> None:
            decoding = [r for r in scheduler(llm).running if r.num_computed_tokens >= r.num_prompt_tokens]
            result.decoding = max(result.decoding, len(decoding))

        result.answers = serve(llm, [m.ask(STEPS, **EVERYTHING) for m in members], look)
        result.snapshots = [watch.snapshots[a.request_id] for a in result.answers]
        result.counts = dict(counts)
        assert_idle(llm)

        watch.clear()
        result.crowd_answers = serve(llm, [m.ask(CROWD_STEPS) for m in crowd])
        result.crowd_ends = [watch.admitted[a.request_id] for a in result.crowd_answers]
        assert_idle(llm)

        watch.clear()
        serve(llm, [members[1].ask(7, n=2, temperature=1.0)])
        result.twins = list(watch.snapshots.values())
        assert_idle(llm)
    return result


# ------------------------------------------------------------------------------------------- in one batch


def test_each_keeps_and_says_what_it_would_alone(batch: Batch) -> None:
    assert batch.decoding == len(batch.members) and not any(a.preemptions for a in batch.answers)
    triggered = 0
    for member, answer, seen in zip(batch.members, batch.answers, batch.snapshots, strict=True):
        if isinstance(member.rule, HeteroCacheDrift):
            triggers = check_steps(batch.reference, member.rule, member.prompt, answer, seen).triggers
            assert triggers or not member.rule.protect, "nothing was fetched, so nothing could be lost"
            triggered += len(triggers)
        else:
            replay = batch.reference.replay(member.prompt, member.rule, STEPS)
            check_kept(member.rule, replay, seen)
            check_logprobs(answer, replay)
    assert batch.counts.get("triggers", 0) == triggered


def test_off_is_stock_vllm_beside_compressed_neighbours(batch: Batch) -> None:
    equal = [a.tokens == stock for a, stock in zip(batch.answers, batch.stock, strict=True)]
    whole = [m.options.get("off") in (1, True) or m.options.get("budget") == 1 for m in batch.members]
    assert [e for e, w in zip(equal, whole, strict=True) if w] == [True] * sum(whole)
    assert not all(equal), "no budget changed any token: the comparison shows nothing"


def test_protected_tokens_are_stored_in_every_step(batch: Batch) -> None:
    """Without the reference: in every head, after the prompt and after every fetch."""
    protecting = [i for i, m in enumerate(batch.members) if m.rule.protect]
    assert len(protecting) >= 3
    for i in protecting:
        safe = {t for start, end in batch.members[i].rule.protect for t in range(start, end)}
        for snapshot in batch.snapshots[i]:
            if snapshot.length >= snapshot.prompt_end:
                assert all(safe <= set(head) for layer in snapshot.kept for head in layer), snapshot.length


def test_resumed_requests_keep_their_options(batch: Batch) -> None:
    """A pool too small for the crowd: some are preempted while decoding, and computed anew as one prompt."""
    resumed = []
    for member, answer, ends in zip(batch.crowd, batch.crowd_answers, batch.crowd_ends, strict=True):
        assert len(ends) == 1 + answer.preemptions and len(answer.tokens) == CROWD_STEPS
        check_segments(batch.reference, member.rule, member.prompt, answer.tokens, ends)
        if ends[-1] > member.length + 1:
            resumed.append(member.options)
    assert [options for options in resumed if options], f"no request with options was resumed: {batch.crowd_ends}"


def test_two_samples_of_one_request(batch: Batch) -> None:
    """n=2 runs as two requests, both with the options of the one that was asked for."""
    member = batch.members[1]
    assert len(batch.twins) == 2
    replay = batch.reference.replay(member.prompt, member.rule, 1)
    for seen in batch.twins:
        (complete,) = [s for s in seen if s.length == member.length]
        assert equal_up_to_ties(complete.kept, replay)


def test_protected_tokens_survive_fetches_as_released(drift_model: Path, profile: Path) -> None:
    """That code takes the earliest of the best positions: tokens late in the prompt would go first."""
    settings = {"kv_policy": "heterocache", "kv_policy_config": knobs(profile, RELEASED[0].rule)}
    reference = Reference(drift_model)
    with tiny_engine(drift_model, **settings) as llm:
        watch = Watch(llm)
        answers = serve(llm, [m.ask(STEPS, **EVERYTHING) for m in RELEASED])
        assert_idle(llm)
    for member, answer in zip(RELEASED, answers, strict=True):
        seen = watch.snapshots[answer.request_id]
        assert check_steps(reference, member.rule, member.prompt, answer, seen).triggers


# ------------------------------------------------------------------------------- refusals, and the host tier

LIMIT = 0.9
FITS = 40  # host slots: one request of up to 512 tokens needs 48 (six satellites), one of up to 320 needs 30
LONG, SHORT = 500, 280


@pytest.fixture(scope="module")
def crowded(drift_model: Path, profile: Path) -> Iterator[Any]:
    """An engine whose host tier holds one request of 257 to 384 tokens at a time."""
    slot = 64 * 2 * 32 * 4
    config = knobs(profile, rule(), host_gib=FITS * slot / 2**30, max_request_budget=LIMIT)
    with tiny_engine(drift_model, kv_policy="heterocache", kv_policy_config=config) as llm:
        assert scheduler(llm)._head_pages.host.capacity == FITS
        yield llm
        assert_idle(llm)


def sampling(tokens: int, **options: Any) -> Any:
    from vllm import SamplingParams

    extra = {f"kvplug.{name}": value for name, value in options.items()}
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=extra)


REFUSED = {
    "no such option": ({"budgets": 0.5}, "kvplug.budgets: no such option"),
    "no number": ({"budget": "half"}, "kvplug.budget must be a number"),
    "no share": ({"budget": 50}, "kvplug.budget must be above 0 and at most 1"),
    "too small for the profile": ({"budget": 0.3}, "kvplug.budget 0.3: heterocache: rho=0.3 pays for"),
    "more than the server allows": ({"budget": 0.95}, "kvplug.budget of at most 0.9"),
    "all, which is more": ({"off": True}, "no kvplug.off"),
    "no flag": ({"off": "maybe"}, "kvplug.off must be true or false"),
    "both": ({"off": True, "budget": 0.5}, "kvplug.off keeps everything: remove kvplug.budget"),
    "no ranges": ({"protect": [5]}, "kvplug.protect must be token ranges"),
    "beyond the prompt": ({"protect": [0, 281]}, "kvplug.protect: the prompt has 280 tokens, a range ends at 281"),
    "no length": ({"context_end": 1.5}, "kvplug.context_end must be a number of tokens, at least 1"),
    "context beyond the prompt": ({"context_end": 281}, "kvplug.context_end: the prompt has 280 tokens"),
    "most of the prompt behind it": ({"context_end": 27}, "kvplug.context_end: 253 of 280 tokens"),
    "most of the prompt": ({"protect": [0, 253]}, "kvplug.protect: 253 of 280 tokens"),
    "many ranges": ({"protect": [[3 * i, 3 * i + 1] for i in range(65)]}, "kvplug.protect takes up to 64 ranges"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_bad_options_are_refused_and_the_engine_goes_on(crowded: Any, reason: str) -> None:
    """By LLM.generate, with the good request before it, and by add_request."""
    options, words = REFUSED[reason]
    good, bad = {"prompt_token_ids": token_ids(40)}, {"prompt_token_ids": token_ids(SHORT)}
    with pytest.raises(ValueError, match=words):
        crowded.generate([good, bad], [sampling(4), sampling(4, **options)], use_tqdm=False)
    with pytest.raises(ValueError, match=words):
        crowded.llm_engine.add_request("bad", bad, sampling(4, **options))
    assert not crowded.llm_engine.has_unfinished_requests()
    (output,) = crowded.generate([good], sampling(4), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4
    crowded.llm_engine.step()
    assert_idle(crowded)


def test_options_up_to_the_limits_are_served(crowded: Any, drift_model: Path) -> None:
    reference = Reference(drift_model)
    ranges = tuple((3 * i, 3 * i + 1) for i in range(64))
    members = [
        Member(SHORT, {"budget": LIMIT}, rule(rho=LIMIT)),
        Member(SHORT, {"protect": [0, 252]}, rule(protect=((0, 252),))),
        Member(SHORT, {"protect": [list(r) for r in ranges]}, rule(protect=ranges)),
    ]
    for member, answer in zip(members, serve(crowded, [m.ask(8) for m in members]), strict=True):
        assert answer.tokens == reference.replay(member.prompt, member.rule, 8).tokens


def test_what_the_host_tier_can_never_hold_is_refused(crowded: Any) -> None:
    """Prompt and answer count: a preempted request computes its answer as part of its prompt."""
    for length, tokens in ((LONG, 4), (SHORT, 200), (SHORT, None)):
        with pytest.raises(ValueError, match="host_gib=.* has 40: lower max_tokens, or raise host_gib"):
            crowded.llm_engine.add_request("long", {"prompt_token_ids": token_ids(length)}, sampling(tokens))
    (output,) = crowded.generate([{"prompt_token_ids": token_ids(SHORT)}], sampling(4), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4


def test_requests_wait_for_room_on_the_host(crowded: Any) -> None:
    """The second and third are held back until the one before has ended or was aborted, and lose nothing by it."""
    asks = [Ask(token_ids(SHORT, seed), 30) for seed in range(4)]
    alone = [serve(crowded, [ask])[0].tokens for ask in asks]
    ledger, used, running = scheduler(crowded)._head_pages.host, [], []

    def look() -> None:
        used.append(ledger.used)
        running.append(len(scheduler(crowded).running))
        assert ledger.used == len(ledger._reserved) * 30 and runtime(crowded).retriever.host.used <= FITS

    asks[1] = replace(asks[1], aborted=6)  # while it waits
    asks[2] = replace(asks[2], aborted=40)  # while it runs
    together = serve(crowded, asks, look)
    assert max(used) == 30 and max(running) == 1
    assert [a.aborted for a in together] == [False, True, True, False]
    assert (together[0].tokens, together[3].tokens) == (alone[0], alone[3])


def test_short_prompts_need_no_room(crowded: Any) -> None:
    """What is not cut is not offloaded: it runs beside one that fills the tier."""
    asks = [Ask(token_ids(SHORT), 30), Ask(token_ids(16), 30)]
    running = []
    serve(crowded, asks, lambda: running.append(len(scheduler(crowded).running)))
    assert max(running) == 2


@pytest.mark.parametrize("options", [{"budget": 0.5}, {"protect": [0, 5]}, {"off": True}, {"context_end": 5}], ids=str)
def test_streaming_refuses(tiny_model_dir: Path, options: Mapping[str, Any]) -> None:
    """Its ring is one for all requests, and would drop what a request protects."""
    from vllm import EngineArgs
    from vllm.v1.engine.input_processor import InputProcessor

    arguments = EngineArgs(model=str(tiny_model_dir), skip_tokenizer_init=True, kv_policy="streaming", max_model_len=64)
    front = InputProcessor(arguments.create_engine_config())
    prompt = {"type": "token", "prompt_token_ids": token_ids(20)}
    with pytest.raises(ValueError, match=f"one ring for all: remove kvplug.{next(iter(options))}$"):
        front.process_inputs("0", prompt, sampling(4, **options), supported_tasks=("generate",))
    assert front.process_inputs("0", prompt, sampling(4), supported_tasks=("generate",)).prompt_token_ids
