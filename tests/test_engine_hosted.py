"""Fast KVzip with a host tier in the engine: what is kept, hosted and dropped, and what every query attends to, as the
reference; the life of its requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import fastkvzip, fastkvzip_yakv
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
from reference import Full, Reference, Rule
from reference_hosted import Selection
from selection_tools import WatchHosted, check_hosted, serve_with_slots

from vllm_kvplug.errors import PolicyError
from vllm_kvplug.policies.registry import make_policy
from vllm_kvplug.shape import ModelShape

LENGTHS = (40, 100, 257, 300, 511, 700)  # one too short to gain by the host; 257: the last chunk is one token
STEPS = 24
HEADS = 6
TOKEN_BYTES = HEADS * (2 * 16 + 4)
"""Of a token in 4 bits, all heads of the tiny model."""


@pytest.fixture(scope="module")
def reference(tiny_model_dir: Path) -> Reference:
    return Reference(tiny_model_dir)


CASES: dict[str, Any] = {
    "exact-host": fastkvzip_yakv(0.2, 0.4, 40, 200, codec="auto", fetch=0.1),
    "paper": fastkvzip_yakv(0.3, 0.3, 20, 200),
    "nothing is dropped": fastkvzip_yakv(0.3, 0.9, 9, 100, share=0.1, codec="auto", fetch=0.2),
    "only a window stays": fastkvzip_yakv(0.02, 0.5, 64, 2048, share=0.2, codec="auto", min_tokens=33),
}
RAGGED = ("exact-host", "paper")
"""In the others there is nothing that heads could share."""


@pytest.mark.parametrize("chunk", [256, 2048])
@pytest.mark.parametrize("name", CASES)
def test_steps_equal_reference(
    name: str, chunk: int, tiny_model_dir: Path, reference: Reference, tmp_path: Path
) -> None:
    """Requests alone, then all in the same batches."""
    case = CASES[name]
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
    assert len(selections) >= 4 and sum(s.swaps for s in selections) < 10
    lengths = {len(head) for layer in replays[-1].kept_after_prompt for head in layer}
    assert (len(lengths) > 1) == (name in RAGGED)


def test_options_of_requests(tiny_model_dir: Path, reference: Reference, tmp_path: Path) -> None:
    """Protected tokens, budgets, a question behind a context token by token, and requests that select nothing."""
    case = fastkvzip_yakv(0.2, 0.4, 40, 100, codec="auto", fetch=0.1)
    cases: list[tuple[int, dict[str, Any], dict[str, Any]]] = [  # how long, the options, and the same for the rule
        (300, {"protect": [10, 40]}, {"protect": ((10, 40),)}),
        (320, {"protect": [0, 5, 150, 315]}, {"protect": ((0, 5), (150, 315))}),
        (250, {"budget": 0.5}, {"ratio": 0.5}),
        (250, {"budget": 0.9}, {"ratio": 0.9}),  # what is left for the host would save no block
        (260, {"context_end": 201}, {"context_end": 201}),
        (190, {"off": 1}, {"ratio": 1}),
        (210, {"budget": 1}, {"ratio": 1}),
    ]
    asks = [
        Ask(token_ids(n, 2), 20, sampling={**EVERYTHING, "extra_args": {f"kvplug.{k}": v for k, v in given.items()}})
        for n, given, _ in cases
    ]
    with tiny_engine(tiny_model_dir, max_num_batched_tokens=100, **case.arguments(tiny_model_dir, tmp_path)) as llm:
        watch = WatchHosted(llm, integrity=True)
        answers = serve(llm, asks)
        assert_idle(llm)
    for (_, _, fields), ask, answer in zip(cases, asks, answers, strict=True):
        rule = replace(case.rule, **fields)
        replay = check_hosted(reference, rule, ask.prompt, answer, watch)
        assert isinstance(replay.watcher, Selection) == (rule.ratio < 0.9)


@pytest.mark.parametrize("codec", ["auto", "higgs4"])
def test_preempted_and_aborted_requests(codec: str, tiny_model_dir: Path, reference: Reference, tmp_path: Path) -> None:
    """A request that is computed again is parted by its longer prompt; pool and host tier are both too small."""
    case = fastkvzip_yakv(0.2, 0.4, 40, 100, codec=codec, fetch=0.1)
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
    case = fastkvzip_yakv(0.2, 0.4, 40, 100)
    asks = [Ask(token_ids(n, 3), 30) for n in (700, 300, 600, 120, 260, 700)]
    arguments = case.arguments(tiny_model_dir, tmp_path)
    with tiny_engine(tiny_model_dir, **arguments) as llm:
        expected = [serve(llm, [ask])[0].tokens for ask in asks]
    arguments["kv_policy_config"]["host_gib"] = 5.5 * TOKEN_BYTES * 64 / (1 << 30)  # five slots of 64 tokens
    with tiny_engine(tiny_model_dir, **arguments) as llm:
        assert [a.tokens for a in serve_with_slots(llm, asks, 5)] == expected
        assert_idle(llm)
        with pytest.raises(ValueError, match="needs 6 slots of host memory .* has 5: lower max_tokens, or raise host_"):
            serve(llm, [Ask(token_ids(850), 60)])


def test_a_ratio_that_holds_everything_is_stock(tiny_model_dir: Path, tmp_path: Path) -> None:
    prompts = [token_ids(n, 4) for n in (5, 120, 256, 300, 700)]
    with tiny_engine(tiny_model_dir, block_size=32) as llm:
        stock = greedy(llm, prompts, 60)
    found = []
    for ratio in (1, 0.2):
        case = fastkvzip_yakv(ratio, 0.4, 40, 200, codec="auto")
        with tiny_engine(tiny_model_dir, **case.arguments(tiny_model_dir, tmp_path)) as llm:
            found.append(greedy(llm, prompts, 60))
            assert_idle(llm)
    assert found[0] == stock
    assert found[1] != stock, "nothing was left out: the comparison shows nothing"


def test_what_eviction_loses_comes_back(reference: Reference) -> None:
    """With as many tokens attended to, answers are nearer to full attention's where queries choose most of them."""
    prompt, evicts = token_ids(400), fastkvzip(0.3, 20, 200)
    full = reference.replay(prompt, Full(), 24)

    def distance(rule: Rule) -> float:
        found = reference.replay(prompt, rule, 24, force_tokens=full.tokens).logits.log_softmax(-1)
        expected = full.logits.log_softmax(-1)
        return float((expected.exp() * (expected - found)).sum(-1).mean())

    assert distance(fastkvzip_yakv(0.1, 0.7, 20, 200, fetch=0.2).rule) < 0.75 * distance(evicts.rule)


@pytest.mark.parametrize(
    "knobs, words",
    [
        ({"codec": "fp8"}, "codec"),
        ({"host_gib": 0}, "host_gib"),
        ({"ratio": 0}, "ratio"),
        ({"offload": 0}, "offload"),
        ({"fetch": 1.5}, "fetch"),
        ({"decode_budget": 512}, "decode_budget"),
        ({"allocation": "layer"}, "allocation"),
    ],
)
def test_refused_knobs(knobs: dict[str, Any], words: str) -> None:
    shape = ModelShape(layers=3, kv_heads=2, query_heads=4, head_dim=32)
    with pytest.raises(PolicyError, match=words):
        make_policy("fastkvzip+yakv", knobs, shape)
