"""Selection inside captured graphs, on a GPU, and gates that are not in them: as in eager mode, and as the reference.

    VLLM_ENABLE_V1_MULTIPROCESSING=0 python -m pytest tests/test_engine_graphs.py

Needs a GPU and some 2 GiB of it; without one all of it is skipped. Run first, since they say more where they fail:
tests/test_top_tokens_kernel.py, tests/test_page_scores_kernel.py and tests/test_token_selection_kernel.py with
`-k 'not interpreted'`, and tests/test_fetch.py. Steps whose rows are all of one token replay a graph for 1, 2, 4 or 8
rows, padded; requests come and go one by one, so that all of them are used, and steps with prompts run eagerly between
them. In the graph nothing of Python runs: a fault shows as other tokens from a request's second decode step on, or as
an illegal address. Then run the eager half alone (`-k eager`), with `CUDA_LAUNCH_BLOCKING=1`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import ANGLES, fastkvzip, fastkvzip_yakv, wgkv
from engine_tools import Ask, check_logprobs, runtime, serve, tiny_engine, token_ids
from option_tools import EVERYTHING, assert_idle
from reference import Reference
from reference_quest import Quest
from reference_yakv import Selecting
from selection_tools import WatchHosted, WatchStored, check_hosted, check_steps
from test_engine_yakv import engine_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LENGTHS = (40, 90, 100, 257, 300, 511)  # some too short to select from; 257: the prompt's last chunk is one token
STEPS = 30
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}
MODES = {
    "eager": {"enforce_eager": True},
    "captured": {"enforce_eager": False, "compilation_config": GRAPHS},
}
CASES: dict[str, dict[str, Any]] = {
    "paper": {},
    "sinks": {"codec": "auto", "sinks": 5, "local": 16, "ratio": 0.1},
    "residual": {"landmarks": "residual", "codec": "auto", "ratio": 0.1},
    "shadowkv": {"landmarks": "means8", "codec": "auto", "ratio": 0.1, "sinks": 3, "local": 24},
}
ASKS = [Ask(token_ids(n), STEPS + 3 * i, arrives=i, sampling=EVERYTHING) for i, n in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def reference(tiny_model_dir: Path) -> Reference:
    return Reference(tiny_model_dir)


def assert_replayed(llm: Any, mode: str, seen: list[int]) -> None:
    """seen: rows of every selection that Python ran in the first layer: with graphs, few of those of one-token rows."""
    steps = STEPS + 3 * len(LENGTHS)
    assert (len(seen) < steps // 2) == (mode == "captured"), f"{len(seen)} of {steps} decode steps ran eagerly"


def watch_selection(selector: Any) -> list[int]:
    seen, select = [], selector.select

    def watched(row_slot: torch.Tensor, layer: int, query: torch.Tensor) -> Any:
        if layer == 0:
            seen.append(len(row_slot))
        return select(row_slot, layer, query)

    selector.select = watched
    return seen


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_tokens_from_the_host(case: str, mode: str, tiny_model_dir: Path, reference: Reference) -> None:
    """What every step saw, of every head, is read from the tables after it, so graphs hide nothing."""
    rule = Selecting(ANGLES, **CASES[case])
    with tiny_engine(tiny_model_dir, **MODES[mode], **engine_of(**CASES[case])) as llm:
        watch, seen = WatchStored(llm, integrity=True), watch_selection(runtime(llm).selector)
        answers = serve(llm, ASKS)
        again = serve(llm, ASKS[-1:])
        assert_idle(llm)
        assert_replayed(llm, mode, seen)
    for ask, answer in zip([*ASKS, ASKS[-1]], [*answers, *again], strict=True):
        check_steps(reference, rule, ask.prompt, answer, *watch.seen(answer))


@pytest.mark.parametrize("mode", MODES)
def test_pages_of_what_was_admitted(mode: str, tiny_model_dir: Path, reference: Reference, tmp_path: Path) -> None:
    """Pages are promoted to before a graph is replayed, which must see their new bounds; a cap lets heads be unlike."""
    case = wgkv(tiny_model_dir, budget_tokens=64, cap=0.5, every=64)
    with tiny_engine(tiny_model_dir, **MODES[mode], **case.arguments(tiny_model_dir, tmp_path)) as llm:
        seen = watch_selection(runtime(llm).page_selector)
        answers = serve(llm, ASKS)
        assert_idle(llm)
        assert_replayed(llm, mode, seen)
    for ask, answer in zip(ASKS, answers, strict=True):
        check_logprobs(answer, reference.replay(ask.prompt, case.rule, ask.tokens))


@pytest.mark.parametrize("mode", MODES)
def test_tokens_that_a_gate_admitted(mode: str, tiny_model_dir: Path, reference: Reference, tmp_path: Path) -> None:
    """Heads have unlike many of them on the host; what leaves the window is promoted before a graph is replayed."""
    case = wgkv(tiny_model_dir, codec="auto", ratio=0.2, sinks=2, cap=0.8, every=64)
    with tiny_engine(tiny_model_dir, **MODES[mode], **case.arguments(tiny_model_dir, tmp_path)) as llm:
        watch, seen = WatchHosted(llm, integrity=True), watch_selection(runtime(llm).selector)
        answers = serve(llm, ASKS)
        assert_idle(llm)
        assert_replayed(llm, mode, seen)
    for ask, answer in zip(ASKS, answers, strict=True):
        check_hosted(reference, case.rule, ask.prompt, answer, watch)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", ["fastkvzip", "fastkvzip+yakv"])
def test_gates_beside_graphs(
    policy: str, mode: str, tiny_model_dir: Path, reference: Reference, tmp_path: Path
) -> None:
    """Decode steps ask no gate, and graphs have none. Prompts are cut at 257 tokens and come in 256 at a time: while
    others decode there are steps of one token a row, one of which needs a score and so must run outside of graphs.
    """
    case = fastkvzip(0.4, 8, 257) if policy == "fastkvzip" else fastkvzip_yakv(0.2, 0.4, 8, 257, codec="auto")
    limits = {"max_num_batched_tokens": 256}
    asks = [Ask(token_ids(n, n), 30, arrives=i, sampling=EVERYTHING) for i, n in enumerate((700, 40, 900, 515, 271))]
    with tiny_engine(tiny_model_dir, **MODES[mode], **limits, **case.arguments(tiny_model_dir, tmp_path)) as llm:
        state, scored = runtime(llm), []
        score = state.gate.score

        def scoring(layer: int, key: torch.Tensor, *more: Any) -> torch.Tensor:
            scored.extend([len(key)] if layer == 0 else [])
            return score(layer, key, *more)

        state.gate.score = scoring
        answers = [*serve(llm, asks[:1]), *serve(llm, asks)]
        assert_idle(llm)
    assert scored[:5] == [256, 1, 256, 1, 186] and len(scored) < 40
    for ask, answer in zip([asks[0], *asks], answers, strict=True):
        check_logprobs(answer, reference.replay(ask.prompt, case.rule, ask.tokens))


@pytest.mark.parametrize("mode", MODES)
def test_pages(mode: str, tiny_model_dir: Path, reference: Reference) -> None:
    knobs = {"ratio": 0.3, "dense_layers": 0}
    with tiny_engine(tiny_model_dir, **MODES[mode], kv_policy="quest", kv_policy_config=knobs) as llm:
        seen = watch_selection(runtime(llm).page_selector)
        answers = serve(llm, ASKS)
        assert_idle(llm)
        assert_replayed(llm, mode, seen)
    for ask, answer in zip(ASKS, answers, strict=True):
        check_logprobs(answer, reference.replay(ask.prompt, Quest(**knobs), ask.tokens))
