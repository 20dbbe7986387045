"""Heads keep what a request's file of scores says: kept sets and distributions are the reference's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_tools import (
    KV_HEADS,
    LAYERS,
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
from option_tools import EVERYTHING, assert_idle
from reference import Full, Reference, Rule
from reference_gated import Oracle
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_kvplug.calibrate.profile import ProfiledModel
from vllm_kvplug.eval.oracle import answer_scores
from vllm_kvplug.policies.oracle import ScoresMetadata, save_scores, scores_name

LENGTHS = (1, 2, 5, 64, 65, 257, 300, 513)
STEPS = 18
RATIO, SHARE = 0.3, 0.05
KNOBS = {"ratio": RATIO, "window": SHARE}


@pytest.fixture(scope="module")
def reference(tiny_model_dir: Path) -> Reference:
    return Reference(tiny_model_dir)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scores")


def known(length: int) -> torch.Tensor:
    """Scores with many ties, that differ much between heads."""
    generator = torch.Generator().manual_seed(length)
    spread = torch.rand(LAYERS, KV_HEADS, 1, generator=generator)
    return (spread * torch.rand(LAYERS, KV_HEADS, length, generator=generator) * 20).round() / 20


def ask(model: Path, folder: Path, prompt: list[int], scores: torch.Tensor, steps: int, **options: Any) -> Ask:
    """A request with scores in a file of its own, as engines read one only once, and with more options."""
    described = ProfiledModel.of(AutoConfig.from_pretrained(model), "tiny")
    named = [*prompt, round(1e6 * float(scores.sum()))]
    save_scores(folder, named, scores, ScoresMetadata(kind="answer", model=described))
    asked = {f"kvplug.{name}": value for name, value in options.items()}
    return Ask(prompt, steps, sampling={**EVERYTHING, "extra_args": {"kvplug.scores": scores_name(named), **asked}})


def oracle(folder: Path, **knobs: Any) -> dict[str, Any]:
    return {"kv_policy": "oracle", "kv_policy_config": {**KNOBS, "scores": str(folder), **knobs}}


@pytest.mark.parametrize("chunk", [256, 2048])
@pytest.mark.parametrize("allocation", ["joint", "layer", "uniform"])
def test_prompts_equal_reference(
    allocation: str, chunk: int, tiny_model_dir: Path, reference: Reference, folder: Path
) -> None:
    """All in one batch, whatever the chunks; the widest head keeps much more than the narrowest."""
    asks = [ask(tiny_model_dir, folder, token_ids(n), known(n), STEPS) for n in LENGTHS]
    engine = oracle(folder, allocation=allocation)
    with tiny_engine(tiny_model_dir, max_num_batched_tokens=chunk, **engine) as llm:
        watch = Watch(llm, integrity=True)
        answers = serve(llm, asks)
        assert_idle(llm)
    for n, one, answer in zip(LENGTHS, asks, answers, strict=True):
        rule = Oracle(RATIO, share=SHARE, known=known(n), allocation=allocation)
        replay = reference.replay(one.prompt, rule, STEPS)
        kept = check_kept(rule, replay, watch.snapshots[answer.request_id])
        check_logprobs(answer, replay)
        counts = [len(head) for layer in kept for head in layer]
        assert sum(counts) == max(int(n * LAYERS * KV_HEADS * 3 / 10), LAYERS * KV_HEADS)
        assert n < 200 or allocation == "uniform" or max(counts) > 1.5 * min(counts)


@pytest.fixture(scope="module")
def engine(tiny_model_dir: Path, folder: Path) -> Iterator[Any]:
    """A pool that holds two dense requests of its longest."""
    with tiny_engine(tiny_model_dir, max_model_len=512, num_gpu_blocks_override=70, **oracle(folder)) as llm:
        yield llm
        assert_idle(llm)


def test_options_of_requests(engine: Any, tiny_model_dir: Path, reference: Reference, folder: Path) -> None:
    """A budget, protected tokens, a context before a question, and nothing dropped, in one batch."""
    cases: list[tuple[int, dict[str, Any], Rule]] = [
        (260, {"budget": 0.5}, Oracle(0.5, share=SHARE, known=known(260))),
        (150, {"protect": [10, 90]}, Oracle(RATIO, share=SHARE, known=known(150), protect=((10, 90),))),
        (140, {"context_end": 120}, Oracle(RATIO, share=SHARE, known=known(120), context_end=120)),
        (90, {"budget": 1}, Full()),
        (91, {"off": 1}, Full()),
    ]
    asks = [
        ask(tiny_model_dir, folder, token_ids(n, 3), known(options.get("context_end", n)), STEPS, **options)
        for n, options, _ in cases
    ]
    watch = Watch(engine, integrity=True)
    for one, answer, (_, _, rule) in zip(asks, serve(engine, asks), cases, strict=True):
        replay = reference.replay(one.prompt, rule, STEPS)
        check_kept(rule, replay, watch.snapshots[answer.request_id])
        check_logprobs(answer, replay)


def test_preempted_requests_keep_their_answers(
    engine: Any, tiny_model_dir: Path, reference: Reference, folder: Path
) -> None:
    """Computed again with its answer so far as part of its prompt, for which there are no scores."""
    prompts = [token_ids(300, seed) for seed in range(20, 26)]
    asks = [ask(tiny_model_dir, folder, prompt, known(300), 200) for prompt in prompts]
    watch = Watch(engine, snapshots=False, integrity=True)
    answers = serve(engine, asks)
    assert any(answer.preemptions for answer in answers), "nothing was preempted"
    rule = Oracle(RATIO, share=SHARE, known=known(300))
    for prompt, answer in zip(prompts, answers, strict=True):
        check_segments(reference, rule, prompt, answer.tokens, watch.admitted[answer.request_id])


def test_scores_of_the_answer_keep_what_it_needs(engine: Any, tiny_model_dir: Path, folder: Path) -> None:
    """From stock's answer by transformers to an engine: what it says next is nearer to stock's than by other scores."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    prompts = [token_ids(200, seed) for seed in range(30, 38)]
    whole = [Ask(prompt, STEPS, sampling={**EVERYTHING, "extra_args": {"kvplug.off": 1}}) for prompt in prompts]
    full = serve(engine, whole)
    needed = [
        answer_scores(model, torch.tensor(prompt + answer.tokens[:-1]), 200)
        for prompt, answer in zip(prompts, full, strict=True)
    ]

    def error(scores: list[torch.Tensor]) -> float:
        """Of the first distribution that is computed with what was kept."""
        asks = [ask(tiny_model_dir, folder, *one, 2) for one in zip(prompts, scores, strict=True)]
        pairs = zip(serve(engine, asks), full, strict=True)
        return sum(float((ours.logprobs[1] - theirs.logprobs[1]).abs().mean()) for ours, theirs in pairs)

    assert error(needed) < 0.7 * error([known(200)] * len(prompts))


def test_a_request_without_scores_is_refused(engine: Any) -> None:
    with pytest.raises(ValueError, match="needs the name of the prompt's file of scores as kvplug.scores"):
        greedy(engine, [token_ids(50)], 4)
