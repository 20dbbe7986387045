"""`kvplug.context_end`: a context is cut before anything behind it is seen, which is stored as an answer is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
    one_thread,  # noqa: F401
    runtime,
    scheduler,
    serve,
    tiny_engine,
    token_ids,
)
from option_tools import EVERYTHING, KNORM_KNOBS, SNAPKV_KNOBS, Member, assert_idle, knorm, snapkv
from reference import Full, Reference, Rule
from reference_drift import HeteroCacheDrift

from benchmarks.drift_model import make_model, write_profile
from benchmarks.engine import used_blocks

STEPS = 23  # four drift windows of five queries and a part of one
CROWD_STEPS = 110
POOL = 96
POLICIES = ["snapkv", "knorm", "heterocache"]


def member(length: int, make: Callable[..., Rule], context_end: int, **options: Any) -> Member:
    return Member(length, {"context_end": context_end, **options}, make(context_end=context_end))


def members(make: Callable[..., Rule], budget: str) -> list[Member]:
    """Contexts that end in the middle, at a chunk's border or close to it, at either end of the prompt."""
    more = {"budget": 0.75, "protect": [[20, 60], [190, 230]]}
    mixed = make(context_end=200, protect=((20, 60), (190, 230)), **{budget: 0.75})
    return [
        member(300, make, 180),
        member(400, make, 256),
        member(310, make, 307),  # less than a drift window
        member(280, make, 279),  # one token behind it
        member(120, make, 1),
        member(257, make, 257),
        member(600, make, 90),  # more tokens behind it than a chunk has
        Member(290, {**more, "context_end": 200}, mixed),
        Member(270, {}, make()),
        Member(260, {"context_end": "100", "off": 1}, Full()),
    ]


@dataclass(frozen=True)
class Served:
    """A policy as engines and the reference know it."""

    make: Callable[..., Rule]
    budget: str
    model: Path
    arguments: Mapping[str, Any]

    @contextmanager
    def engine(self, **more: Any) -> Iterator[Any]:
        with tiny_engine(self.model, **self.arguments, **more) as llm:
            yield llm
            assert_idle(llm)

    def check(self, reference: Reference, one: Member, answer: Answer, seen: Sequence[Any]) -> None:
        if isinstance(one.rule, HeteroCacheDrift):
            check_steps(reference, one.rule, one.prompt, answer, list(seen))
            return
        replay = reference.replay(one.prompt, one.rule, len(answer.tokens))
        check_kept(one.rule, replay, seen)
        check_logprobs(answer, replay)


@pytest.fixture(scope="module")
def drift_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("drift"))


@pytest.fixture(scope="module", params=POLICIES)
def served(request: pytest.FixtureRequest) -> Served:
    if request.param == "heterocache":
        model = request.getfixturevalue("drift_model")
        config = knobs(write_profile(model, model.parent / "profile.json"), rule())
        return Served(rule, "rho", model, {"kv_policy": "heterocache", "kv_policy_config": config})
    make, config = (snapkv, SNAPKV_KNOBS) if request.param == "snapkv" else (knorm, KNORM_KNOBS)
    model = request.getfixturevalue("tiny_model_dir")
    return Served(make, "ratio", model, {"kv_policy": request.param, "kv_policy_config": config})


@pytest.fixture(scope="module")
def reference(served: Served) -> Reference:
    return Reference(served.model)


@pytest.mark.parametrize("chunk", [256, 2048])
def test_each_keeps_and_says_what_the_reference_does(served: Served, reference: Reference, chunk: int) -> None:
    """All in the same batches."""
    asked = members(served.make, served.budget)
    with served.engine(max_num_batched_tokens=chunk, max_num_seqs=len(asked)) as llm:
        watch = Watch(llm, integrity=True)
        answers = serve(llm, [m.ask(STEPS, **EVERYTHING) for m in asked])
    for one, answer in zip(asked, answers, strict=True):
        served.check(reference, one, answer, watch.snapshots[answer.request_id])


def test_a_context_of_the_whole_prompt_is_none(served: Served) -> None:
    prompt = token_ids(300, 7)
    options = [{}, {"extra_args": {"kvplug.context_end": 300}}]
    with served.engine() as llm:
        watch = Watch(llm)
        plain, marked = (serve(llm, [Ask(prompt, STEPS, sampling={**EVERYTHING, **o})])[0] for o in options)
    assert plain.tokens == marked.tokens and plain.logprobs.equal(marked.logprobs)
    assert watch.snapshots[plain.request_id] == watch.snapshots[marked.request_id]


def test_what_a_context_keeps_does_not_depend_on_the_question(served: Served) -> None:
    """Two questions of unlike length behind one context; without the option one prompt is cut otherwise."""
    context, options = token_ids(210, 7), {"extra_args": {"kvplug.context_end": 210}}
    prompts = [context + token_ids(20, 8), context + token_ids(90, 9)]
    with served.engine() as llm:
        watch = Watch(llm)
        marked = [serve(llm, [Ask(prompt, 2, sampling=options)])[0] for prompt in prompts]
        plain = serve(llm, [Ask(prompts[0], 2)])[0]
    cut = [next(s for s in watch.snapshots[a.request_id] if s.length == 210) for a in marked]
    assert cut[0].kept == cut[1].kept and any(len(head) < 210 for layer in cut[0].kept for head in layer)
    of_context = [[[t for t in h if t < 210] for h in layer] for layer in watch.snapshots[plain.request_id][0].kept]
    assert of_context != cut[0].kept


def test_resumed_requests_keep_their_context(served: Served, reference: Reference) -> None:
    """A pool too small for the crowd: some are preempted, and cut where their context ends once more."""
    ends = (300, 120, 200, 1, 250, 180)
    crowd = [member(300 + i, served.make, end) for i, end in enumerate(ends)]
    with served.engine(num_gpu_blocks_override=POOL, max_model_len=512) as llm:
        watch = Watch(llm, integrity=True)
        answers = serve(llm, [m.ask(CROWD_STEPS) for m in crowd])
    resumed = 0
    for one, answer in zip(crowd, answers, strict=True):
        begun = watch.admitted[answer.request_id]
        assert len(begun) == 1 + answer.preemptions and len(answer.tokens) == CROWD_STEPS
        check_segments(reference, one.rule, one.prompt, answer.tokens, begun)
        resumed += begun[-1] > one.length + 1
    assert resumed, "no request was preempted while it decoded"


def test_a_lone_request_fits_the_smallest_pool(served: Served) -> None:
    with served.engine(max_model_len=512) as llm:
        most = scheduler(llm)._head_pages.kv_cache_spec.plan.peak_blocks(512)
    with served.engine(max_model_len=512, num_gpu_blocks_override=most + 1, max_num_batched_tokens=512) as llm:
        for end in (1, 17, 250, 479, 487, 502):
            (answer,) = serve(llm, [member(503, served.make, end).ask(8)])
            assert len(answer.tokens) == 8 and not answer.preemptions


def test_the_rest_waits_for_what_the_context_gives_back(tiny_model_dir: Path) -> None:
    """With async scheduling the context's step may still run when the next is made; vLLM has none on a CPU."""
    from vllm import SamplingParams

    with tiny_engine(tiny_model_dir, kv_policy="snapkv", kv_policy_config={"ratio": 0.1}) as llm:
        core, requests = llm.llm_engine, scheduler(llm).requests
        for end, waits in ((160, True), (250, False)):
            extra = {"kvplug.context_end": end}
            params = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False, extra_args=extra)
            core.add_request("0", {"prompt_token_ids": token_ids(250)}, params)
            core.step()
            (request,) = requests.values()
            assert request.num_computed_tokens == end
            request.num_in_flight_tokens += 1
            core.step()
            assert (request.num_computed_tokens == end) == waits
            request.num_in_flight_tokens -= 1
            while core.has_unfinished_requests():
                core.step()
            assert used_blocks(llm) == 0


def test_a_cut_in_flight_is_waited_for_if_blocks_are_short(tiny_model_dir: Path) -> None:
    """A prompt's second chunk, right behind a cut, in a pool without a free block: it is not preempted for that."""
    from vllm import SamplingParams

    knobs = {"ratio": 0.1, "cut_every": 128}
    with tiny_engine(tiny_model_dir, max_num_batched_tokens=128, kv_policy="knorm", kv_policy_config=knobs) as llm:
        core, requests = llm.llm_engine, scheduler(llm).requests
        pool = scheduler(llm).kv_cache_manager.block_pool
        for short in (True, False):
            params = SamplingParams(max_tokens=40, ignore_eos=True, detokenize=False)
            core.add_request("0", {"prompt_token_ids": token_ids(256)}, params)
            core.step()
            (request,) = requests.values()
            assert request.num_computed_tokens == 128
            taken = pool.get_new_blocks(pool.get_num_free_blocks()) if short else []
            request.num_in_flight_tokens += 1
            core.step()
            assert (request.num_computed_tokens == 128) == short and request.num_preemptions == 0
            request.num_in_flight_tokens -= 1
            pool.free_blocks(taken[:4])  # with what the cut gives back it is enough
            core.step()
            assert request.num_computed_tokens >= 256 and request.num_preemptions == 0
            pool.free_blocks(taken[4:])
            while core.has_unfinished_requests():
                core.step()
            assert used_blocks(llm) == 0


def test_drift_is_checked_when_the_question_is_in(drift_model: Path) -> None:
    """With the last five queries of the question, if it has so many; then every five tokens, as ever."""
    config = knobs(write_profile(drift_model, drift_model.parent / "profile.json"), rule())
    every = [400, 405, 410, 415, 420]
    checks: list[tuple[int, int, list[int]]] = []
    with tiny_engine(drift_model, kv_policy="heterocache", kv_policy_config=config) as llm:
        runtime(llm).retriever.on_check = lambda *check: checks.append(check)
        for behind, lengths in ((4, every[1:]), (5, every), (300, every)):
            checks.clear()
            serve(llm, [member(400, rule, 400 - behind).ask(STEPS)])
            assert [length for length, _, _ in checks] == lengths
    assert checks[0][1:] == (401, [0, 1, 2]), "the answer's second token is the first to see what was fetched"
