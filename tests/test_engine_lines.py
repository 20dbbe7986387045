"""Engines that select as CUDA does it: kernels in Triton's interpreter, lines, and what a step prepares for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import ANGLES, fastkvzip_yakv, wgkv
from engine_tools import Ask, check_logprobs, runtime, serve, tiny_engine, token_ids
from kernel_tools import INTERPRETED, run_interpreted, starts_interpreter
from option_tools import EVERYTHING, assert_idle
from reference import Reference
from reference_quest import Quest
from reference_yakv import Selecting
from selection_tools import WatchHosted, WatchStored, check_hosted, check_steps
from test_engine_yakv import engine_of

from vllm_kvplug.worker.page_selection import AttendedLines
from vllm_kvplug.worker.selection_lines import SelectedLines

in_interpreter = pytest.mark.skipif(not INTERPRETED, reason="on CPU tensors, in the interpreter")
ASKS = [Ask(token_ids(n), 4 + i, arrives=i, sampling=EVERYTHING) for i, n in enumerate((40, 257, 150))]
LIMITS = {"max_model_len": 512, "max_num_seqs": 3, "max_num_batched_tokens": 512}


@in_interpreter
@pytest.mark.parametrize("case", [{}, {"landmarks": "means8", "codec": "auto", "ratio": 0.1, "sinks": 3, "local": 24}])
def test_tokens_from_the_host(case: dict[str, Any], tiny_model_dir: Path) -> None:
    rule = Selecting(ANGLES, **case)
    with tiny_engine(tiny_model_dir, **LIMITS, **engine_of(**case)) as llm:
        selector = runtime(llm).selector
        name = case.get("landmarks", "higgs2")
        room = selector.landmarks, selector.geometry, selector.pool, selector.tables, 3
        selector.lines = SelectedLines(name, *room)
        watch = WatchStored(llm, integrity=True)
        answers = serve(llm, ASKS)
        assert_idle(llm)
    for ask, answer in zip(ASKS, answers, strict=True):
        check_steps(Reference(tiny_model_dir), rule, ask.prompt, answer, *watch.seen(answer))


@in_interpreter
@pytest.mark.parametrize("kind", ["left", "admitted"])
def test_tokens_that_a_gate_sent_to_the_host(kind: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    """They are known by numbers, which page tables hold above all positions. Of what a gate has admitted heads have
    unlike many there, which only the device knows.
    """
    if kind == "admitted":
        case = wgkv(tiny_model_dir, codec="auto", ratio=0.2, sinks=2)
    else:
        case = fastkvzip_yakv(0.2, 0.5, 20, 128, codec="auto", fetch=0.1)
    with tiny_engine(tiny_model_dir, **LIMITS, **case.arguments(tiny_model_dir, tmp_path)) as llm:
        selector = runtime(llm).selector
        room = selector.landmarks, selector.geometry, selector.pool, selector.tables, 3
        selector.lines = SelectedLines("higgs2", *room)
        watch = WatchHosted(llm, integrity=True)
        answers = serve(llm, ASKS)
        assert_idle(llm)
    for ask, answer in zip(ASKS, answers, strict=True):
        check_hosted(Reference(tiny_model_dir), case.rule, ask.prompt, answer, watch)
    assert len(watch.hosted) == 2


@in_interpreter
def test_pages(tiny_model_dir: Path) -> None:
    knobs = {"ratio": 0.3, "dense_layers": 1}
    with tiny_engine(tiny_model_dir, **LIMITS, kv_policy="quest", kv_policy_config=knobs) as llm:
        selector = runtime(llm).page_selector
        blocks = len(selector.pool.pages) // selector.geometry.heads
        selector._lines = AttendedLines(selector.geometry, 3, blocks, torch.device("cpu"))
        answers = serve(llm, ASKS)
        assert_idle(llm)
    for ask, answer in zip(ASKS, answers, strict=True):
        check_logprobs(answer, Reference(tiny_model_dir).replay(ask.prompt, Quest(**knobs), ask.tokens))


@in_interpreter
def test_pages_of_what_was_admitted(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Of heads with unlike numbers of pages, which only the device knows."""
    case = wgkv(tiny_model_dir, budget_tokens=64, cap=0.5, every=64)
    with tiny_engine(tiny_model_dir, **LIMITS, **case.arguments(tiny_model_dir, tmp_path)) as llm:
        selector = runtime(llm).page_selector
        selector._lines = AttendedLines(selector.geometry, 3, 3 * LIMITS["max_model_len"] // 16, torch.device("cpu"))
        answers = serve(llm, ASKS)
        assert_idle(llm)
    for ask, answer in zip(ASKS, answers, strict=True):
        check_logprobs(answer, Reference(tiny_model_dir).replay(ask.prompt, case.rule, ask.tokens))


@starts_interpreter
def test_interpreted() -> None:
    run_interpreted(__file__)
