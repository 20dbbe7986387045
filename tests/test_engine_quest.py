"""Quest in the engine: the pages that queries attend to, and what comes of it, as the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_tools import (
    Ask,
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
from reference import Full, Reference
from reference_quest import Quest

LENGTHS = (20, 47, 48, 90, 257, 300, 511)  # 257: the prompt's last chunk is one token
STEPS = 36


@pytest.fixture(scope="module")
def reference(tiny_model_dir: Path) -> Reference:
    return Reference(tiny_model_dir)


def quest(**knobs: Any) -> dict[str, Any]:
    return {"kv_policy": "quest", "kv_policy_config": knobs}


def ids_of_pages(selector: Any, slot: int, layer: int) -> list[list[int]]:
    """Page ids of each head of a layer, in order."""
    from vllm_kvplug.placement.integrity import head_pages

    heads = selector.geometry.kv_heads
    return [head_pages(selector.tables, slot, head) for head in range(layer * heads, (layer + 1) * heads)]


@pytest.mark.parametrize("chunk", [100, 2048])
@pytest.mark.parametrize(
    "knobs", [{"ratio": 0.3, "dense_layers": 1}, {"budget_tokens": 80, "dense_layers": 0}], ids=str
)
def test_steps_equal_reference(chunk: int, knobs: dict[str, Any], tiny_model_dir: Path, reference: Reference) -> None:
    """All in the same batches; alone: which pages are chosen."""
    with tiny_engine(tiny_model_dir, max_num_batched_tokens=chunk, **quest(**knobs)) as llm:
        asks = [Ask(token_ids(n), STEPS, arrives=i, sampling=EVERYTHING) for i, n in enumerate(LENGTHS)]
        answers = serve(llm, asks)
        selector, seen = runtime(llm).page_selector, {}
        select = selector.select

        def watched(row_slot: Any, layer: int, query: Any) -> Any:
            attended = select(row_slot, layer, query)
            if attended is not None:
                slot, length = int(row_slot[0]), int(selector.tables.lengths[int(row_slot[0]), 0])
                pages = ids_of_pages(selector, slot, layer)
                count = -(-int(attended.lengths[0, 0]) // 16)
                ids = [attended.chunks[attended.directory[0, h].long()].flatten()[:count] for h in range(len(pages))]
                seen[length, layer] = [[p.index(i) for i in head.tolist()] for p, head in zip(pages, ids, strict=True)]
            return attended

        selector.select = watched
        (alone,) = serve(llm, [Ask(token_ids(511), STEPS, sampling=EVERYTHING)])
        assert_idle(llm)
    rule = Quest(**knobs)
    for ask, answer in zip([*asks, asks[-1]], [*answers, alone], strict=True):
        check_logprobs(answer, reference.replay(ask.prompt, rule, STEPS))
    assert seen and seen == {key: pages for key, pages in rule.chosen.items() if key in seen}
    assert len(seen) == (STEPS - 1) * (3 - rule.dense_layers)


def test_options_and_preemption(tiny_model_dir: Path, reference: Reference) -> None:
    """A budget of a request's own, none at all, and requests that are computed again, from a prompt seen whole."""
    with tiny_engine(tiny_model_dir, **quest(ratio=0.2, dense_layers=0)) as llm:
        options: list[dict[str, Any]] = [{"kvplug.budget": 0.4}, {"kvplug.off": 1}]
        sampling = [{**EVERYTHING, "extra_args": given} for given in options]
        answers = serve(llm, [Ask(token_ids(200, 1), 30, sampling=given) for given in sampling])
        for rule, answer in zip((Quest(0.4, dense_layers=0), Full()), answers, strict=True):
            check_logprobs(answer, reference.replay(token_ids(200, 1), rule, 30))
    limits = {"max_model_len": 512, "num_gpu_blocks_override": 60}
    with tiny_engine(tiny_model_dir, **limits, **quest(ratio=0.3)) as llm:
        ends: dict[str, list[int]] = {}
        begin = runtime(llm).begin_step

        def watched(lifecycle: Any) -> None:
            for request_id, admission in lifecycle.admitted.items():
                ends.setdefault(request_id, []).append(admission.tokens)
            begin(lifecycle)

        runtime(llm).begin_step = watched
        asks = [Ask(token_ids(230, seed), 100, arrives=seed) for seed in range(4)]
        asks += [Ask(token_ids(200, 9), 60, aborted=step) for step in (1, 20)]
        answers = serve(llm, asks)
        assert_idle(llm)
    assert any(answer.preemptions for answer in answers), "nothing was preempted"
    for ask, answer in zip(asks, answers, strict=True):
        if not answer.aborted:
            check_segments(reference, Quest(0.3), ask.prompt, answer.tokens, ends[answer.request_id])


def test_a_budget_that_holds_everything_is_stock(tiny_model_dir: Path) -> None:
    prompts = [token_ids(n, 4) for n in (5, 120, 256, 300)]
    with tiny_engine(tiny_model_dir, block_size=32) as llm:
        stock = greedy(llm, prompts, 50)
    with tiny_engine(tiny_model_dir, **quest(ratio=1)) as llm:
        assert greedy(llm, prompts, 50) == stock
    with tiny_engine(tiny_model_dir, **quest(ratio=0.2)) as llm:
        assert greedy(llm, prompts, 50) != stock, "nothing was left out: the comparison shows nothing"
