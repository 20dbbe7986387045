"""Admission with a host tier in the engine: what heads store, have on the host and attend to, as the reference; the
life of their requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import wgkv
from engine_tools import (
    Ask,
    check_segments,
    greedy,
    one_thread,  # noqa: F401
    serve,
    tiny_engine,
    token_ids,
)
from option_tools import EVERYTHING, assert_idle
from reference import Reference
from reference_hosted import Selection
from selection_tools import WatchHosted, check_hosted, serve_with_slots
from transformers import AutoConfig

from vllm_kvplug.errors import PolicyError
from vllm_kvplug.options import OptionError, RequestOptions
from vllm_kvplug.planning import model_shape
from vllm_kvplug.policies.registry import make_policy

# Too short to gain by the host, around pages and cuts, several chunks; 257: the last chunk is one token.
LENGTHS = (33, 90, 257, 300, 600)
STEPS = 70  # four pages are promoted
HEADS = 6
TOKEN_BYTES = HEADS * (2 * 16 + 4)
"""Of a token in 4 bits, all heads of the tiny model."""

CASES: dict[str, dict[str, Any]] = {
    "exact-host": {"codec": "auto", "ratio": 0.2},
    "paper": {"codec": "higgs4"},
    "capped": {"codec": "auto", "cap": 0.3, "every": 64, "sinks": 2, "ratio": 0.3},
    "bounds": {"codec": "auto", "window": 41, "ratio": 0.5, "min_tokens": 3, "max_tokens": 21},
    "few": {"codec": "auto", "tau": 0.8, "min_tokens": 9},
    "deferred": {"codec": "auto", "sinks": 3, "defer": True},
}


@pytest.fixture(scope="module")
def reference(tiny_model_dir: Path) -> Reference:
    return Reference(tiny_model_dir)


@pytest.mark.parametrize("chunk", [256, 2048])
@pytest.mark.parametrize("name", CASES)
def test_steps_equal_reference(
    name: str, chunk: int, tiny_model_dir: Path, reference: Reference, tmp_path: Path
) -> None:
    """Requests alone, then all in the same batches."""
    case = wgkv(tiny_model_dir, **CASES[name])
    arguments = case.arguments(tiny_model_dir, tmp_path)
    with tiny_engine(tiny_model_dir, max_num_batched_tokens=chunk, **arguments) as llm:
        watch = WatchHosted(llm, integrity=True)
        alone = [serve(llm, [Ask(token_ids(n), STEPS, sampling=EVERYTHING)])[0] for n in LENGTHS]
        asks = [Ask(token_ids(n), STEPS, arrives=i, sampling=EVERYTHING) for i, n in enumerate(LENGTHS)]
        mixed = serve(llm, asks)
        assert_idle(llm)
    replays = []
    for length, one, other in zip(LENGTHS, alone, mixed, strict=True):
        replays.append(check_hosted(reference, case.rule, token_ids(length), one, watch))
        said, told = (
            (answer.tokens, watch.hosted.get(answer.request_id), {s.length: s.kept for s in watch.seen(answer)[0]})
            for answer in (one, other)
        )
        if said != told:  # close scores may round apart in another batch
            check_hosted(reference, case.rule, token_ids(length), other, watch)
    selections = [r.watcher for r in replays if isinstance(r.watcher, Selection)]
    assert len(selections) >= 3 and sum(s.swaps for s in selections) < 10
    counts = [len(head) for layer in selections[-1].hosted for head in layer]
    assert max(counts) > min(counts), "heads have admitted equally many tokens: the comparison shows little"


# Across pages and the window; up to the end; and a last token that is a chunk of its own.
PROTECTED = [(300, ((3, 40), (120, 121))), (511, ((100, 180), (470, 511))), (257, ((230, 257),)), (200, ())]


@pytest.mark.parametrize("fields", [{}, {"cap": 0.3, "every": 64, "sinks": 5}], ids=["no-cap", "capped"])
def test_protected_tokens_stay(
    fields: dict[str, Any], tiny_model_dir: Path, reference: Reference, tmp_path: Path
) -> None:
    """On the device, where every query attends to them."""
    case = wgkv(tiny_model_dir, codec="auto", ratio=0.2, **fields)
    asks = []
    for i, (n, ranges) in enumerate(PROTECTED):
        extra = {"kvplug.protect": [list(one) for one in ranges]} if ranges else None
        asks.append(Ask(token_ids(n), 40, arrives=i, sampling={**EVERYTHING, "extra_args": extra}))
    with tiny_engine(tiny_model_dir, **case.arguments(tiny_model_dir, tmp_path)) as llm:
        watch = WatchHosted(llm, integrity=True)
        answers = serve(llm, asks)
        assert_idle(llm)
    for ask, (n, ranges), answer in zip(asks, PROTECTED, answers, strict=True):
        rule = replace(case.rule, protect=ranges)
        check_hosted(reference, rule, ask.prompt, answer, watch)
        safe = {t for a, b in ranges for t in range(a, b)} | {*range(rule.sinks)}
        for snapshot in watch.seen(answer)[0]:
            assert snapshot.length < n or all(safe <= set(head) for layer in snapshot.kept for head in layer)


@pytest.mark.parametrize("codec", ["auto", "higgs4"])
def test_preempted_and_aborted_requests(codec: str, tiny_model_dir: Path, reference: Reference, tmp_path: Path) -> None:
    """A request that is computed again has more on the host; the pool is too small."""
    case = wgkv(tiny_model_dir, codec=codec, ratio=0.2, cap=0.8, every=100)
    limits = {"max_model_len": 512, "num_gpu_blocks_override": 48}
    with tiny_engine(tiny_model_dir, **limits, **case.arguments(tiny_model_dir, tmp_path)) as llm:
        watch = WatchHosted(llm, snapshots=False, integrity=True)
        asks = [Ask(token_ids(230, seed), 140, arrives=seed) for seed in range(6)]
        asks += [Ask(token_ids(200, 9), 100, aborted=step) for step in (1, 20, 60)]
        answers = serve(llm, asks)
        assert_idle(llm)
    ends = [watch.admitted[a.request_id] for a in answers if not a.aborted]
    assert any(max(end) > 240 for end in ends), f"nothing was preempted late enough: {ends}"
    if codec == "auto":
        for ask, answer in zip(asks, answers, strict=True):
            if not answer.aborted:
                check_segments(reference, case.rule, ask.prompt, answer.tokens, watch.admitted[answer.request_id])


def test_a_host_tier_that_is_too_small(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Requests wait for room and get the tokens of a roomy engine; one that never fits is refused at the door."""
    case = wgkv(tiny_model_dir, codec="higgs4", cap=0.5, every=100)
    asks = [Ask(token_ids(n, 3), 30) for n in (600, 300, 500, 120, 260, 600)]
    arguments = case.arguments(tiny_model_dir, tmp_path)
    with tiny_engine(tiny_model_dir, **arguments) as llm:
        expected = [serve(llm, [ask])[0].tokens for ask in asks]
    arguments["kv_policy_config"]["host_gib"] = 5.5 * TOKEN_BYTES * 64 / (1 << 30)  # five slots of 64 tokens
    with tiny_engine(tiny_model_dir, **arguments) as llm:
        assert [a.tokens for a in serve_with_slots(llm, asks, 5)] == expected
        assert_idle(llm)
        # Half of what is beyond the window of 32, 326 tokens, is more than five slots hold.
        with pytest.raises(ValueError, match="needs 6 slots of host memory .* has 5: lower max_tokens, or raise host_"):
            serve(llm, [Ask(token_ids(625), 60)])


def test_budgets_that_hold_everything(tiny_model_dir: Path, tmp_path: Path) -> None:
    """The tokens of plain wgkv if each query selects all that is on the host, and stock vLLM's if all was admitted."""
    prompts = [token_ids(n, 4) for n in (5, 120, 256, 300, 600)]
    tokens, on_host = {}, []
    for name, fields in (("wgkv", {}), ("all", {"min_tokens": 400}), ("some", {"min_tokens": 9})):
        given = {} if name == "wgkv" else {"codec": "auto", **fields}
        case = wgkv(tiny_model_dir, tau=0.65, **given)
        with tiny_engine(tiny_model_dir, **case.arguments(tiny_model_dir, tmp_path)) as llm:
            watch = WatchHosted(llm) if name == "all" else None
            tokens[name] = greedy(llm, prompts, 60)
            on_host += [len(head) for heads in watch.hosted.values() for head in heads] if watch else []
    assert on_host and 0 < max(on_host) <= 400, f"the longest prompt's heads must gain and select all: {on_host}"
    assert tokens["all"] == tokens["wgkv"]
    assert tokens["some"] != tokens["wgkv"], "nothing was left out: the comparison shows nothing"
    with tiny_engine(tiny_model_dir) as llm:
        stock = greedy(llm, prompts, 60)
    for fields in ({"ratio": 1.0}, {"min_tokens": 600}):
        case = wgkv(tiny_model_dir, tau=0.0, codec="auto", **fields)
        with tiny_engine(tiny_model_dir, **case.arguments(tiny_model_dir, tmp_path)) as llm:
            assert greedy(llm, prompts, 60) == stock
            assert_idle(llm)


@pytest.mark.parametrize(
    "knobs, words",
    [
        ({"codec": "fp8"}, "codec"),
        ({"host_gib": 0}, "host_gib"),
        ({"ratio": 0}, "ratio"),
        ({"cap": 1.5}, "cap"),
        ({"max_tokens": 8}, "wgkv.yakv: max_tokens is below min_tokens: change one of them in --kv-policy-config"),
        ({"landmarks": "residual"}, "landmarks"),
    ],
)
def test_refused_knobs(knobs: dict[str, Any], words: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    given = wgkv(tiny_model_dir, codec="auto").arguments(tiny_model_dir, tmp_path)["kv_policy_config"]
    shape = model_shape(AutoConfig.from_pretrained(tiny_model_dir), "tiny", 1)
    with pytest.raises(PolicyError, match=words):
        make_policy("wgkv+yakv", {**given, "max_tokens": None, **knobs}, shape)


def test_refused_options(tiny_model_dir: Path, tmp_path: Path) -> None:
    case = wgkv(tiny_model_dir, codec="auto")
    shape = model_shape(AutoConfig.from_pretrained(tiny_model_dir), "tiny", 1)
    policy = make_policy(case.policy, case.arguments(tiny_model_dir, tmp_path)["kv_policy_config"], shape)
    for options in (RequestOptions(budget=0.5), RequestOptions(context_end=9), RequestOptions(off=True)):
        with pytest.raises(OptionError, match="remove kvplug"):
            policy.for_request(options)
