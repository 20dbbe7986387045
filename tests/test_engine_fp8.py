"""An engine with FP8 pages keeps the reference's tokens, and gives its distributions: of K and V as they are stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import (
    ANGLES,
    TWO_PIVOTS,
    Case,
    duo,
    expected_attention,
    fastkvzip,
    fastkvzip_yakv,
    heterocache,
    knorm,
    random_keep,
    snapkv,
    streaming,
    wgkv,
)
from engine_tools import (
    Ask,
    Pinned,
    Watch,
    check_kept,
    equal_up_to_ties,
    one_thread,  # noqa: F401
    serve,
    tiny_engine,
    token_ids,
)
from reference import Reference
from reference_hosted import Selection
from reference_yakv import Selecting

LENGTHS = (1, 20, 63, 260, 513)
STEPS = 18
ON_THE_BORDER, TYPICAL = 0.1, 0.003
"""K and V that differ in float32's last bit may be rounded to neighbouring e4m3 numbers, of which a CPU's own order of
additions decides: one such number was seen to move a log-probability by 0.05, and most by less than 0.001. K and V that
are not rounded at all moved them by 0.7 and more."""
CASES = [
    streaming(64),
    snapkv(0.5),
    random_keep(0.4),
    duo(0.5),
    expected_attention(0.4),
    heterocache("two-pivots", TWO_PIVOTS, 0.6),
    knorm(0.5, 16, 1024),
    fastkvzip(0.4, 40, 1024),
]


def stored(x: torch.Tensor) -> torch.Tensor:
    """As e4m3, the largest finite number where x exceeds it."""
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


def assert_same_distributions(logprobs: torch.Tensor, logits: torch.Tensor) -> None:
    """Those of an engine [steps, vocabulary], and the reference's, up to numbers on the border of two e4m3 ones."""
    errors = (logprobs - logits.log_softmax(-1)).abs()
    worst, typical = errors.max().item(), errors.median().item()
    off = f"log-probabilities are off by {typical:.2e}, at most {worst:.2e}"
    assert worst < ON_THE_BORDER and typical < TYPICAL, off


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def ran(request: pytest.FixtureRequest, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory):
    case: Case = request.param
    arguments = case.arguments(tiny_model_dir, tmp_path_factory.mktemp("profiles"))
    with tiny_engine(tiny_model_dir, max_num_batched_tokens=2048, kv_cache_dtype="fp8", **arguments) as llm:
        watch = Watch(llm)
        answers = {}
        for n in LENGTHS:
            watch.clear()
            (answer,) = serve(llm, [Ask(token_ids(n), STEPS, sampling={"logprobs": -1})])
            answers[n] = answer, watch.snapshots[answer.request_id]
        pages = watch.runtime.pool.pages
        block = watch.runtime.geometry.block_bytes
        assert pages.dtype == torch.float8_e4m3fn and pages.nbytes % block == 0
        scheduled = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
        assert pages.nbytes == scheduled.num_blocks * block
    return case, answers


@pytest.fixture(scope="module")
def reference(tiny_model_dir: Path) -> Reference:
    return Reference(tiny_model_dir, stored=stored)


@pytest.mark.parametrize("length", LENGTHS)
def test_engine_with_fp8_pages(ran, reference: Reference, length: int) -> None:
    case, answers = ran
    answer, snapshots = answers[length]
    replay = reference.replay(token_ids(length), case.rule, STEPS)
    check_kept(case.rule, replay, snapshots)
    kept = next(s.kept for s in snapshots if s.length == length)
    if not equal_up_to_ties(kept, replay):
        replay = reference.replay(token_ids(length), Pinned(kept), STEPS)
    assert_same_distributions(answer.logprobs, replay.logits)


def test_admission_with_fp8_pages(tiny_model_dir: Path, reference: Reference, tmp_path: Path) -> None:
    case = wgkv(tiny_model_dir)
    arguments = case.arguments(tiny_model_dir, tmp_path)
    with tiny_engine(tiny_model_dir, max_num_batched_tokens=2048, kv_cache_dtype="fp8", **arguments) as llm:
        for n in LENGTHS:
            (answer,) = serve(llm, [Ask(token_ids(n), STEPS, sampling={"logprobs": -1})])
            assert_same_distributions(answer.logprobs, reference.replay(token_ids(n), case.rule, STEPS).logits)


def test_selection_with_fp8_pages(tiny_model_dir: Path, reference: Reference) -> None:
    """Fetched tokens are rounded as those were that are stored; landmarks are of stored keys."""
    knobs = {"ratio": 0.2, "sinks": 2, "local": 16, "codec": "auto"}
    settings = {"kv_policy": "yakv", "kv_policy_config": {**knobs, "host_gib": 0.05}, "kv_cache_dtype": "fp8"}
    with tiny_engine(tiny_model_dir, max_num_batched_tokens=2048, **settings) as llm:
        watch = Watch(llm)
        for n in LENGTHS:
            (answer,) = serve(llm, [Ask(token_ids(n), STEPS, sampling={"logprobs": -1})])
            kept = {s.length: s.kept for s in watch.snapshots[answer.request_id]}
            rule = Selecting(ANGLES, **knobs, engine=kept, itemsize=1)
            assert_same_distributions(answer.logprobs, reference.replay(token_ids(n), rule, STEPS).logits)
            assert (rule.watcher is not None) == (n > 200)


def test_hosted_tokens_with_fp8_pages(tiny_model_dir: Path, reference: Reference, tmp_path: Path) -> None:
    """What goes to the host at the prompt's end was stored before: it is rounded already, and comes back as it was."""
    case = fastkvzip_yakv(0.2, 0.6, 24, 100, codec="auto", fetch=0.1)
    arguments = case.arguments(tiny_model_dir, tmp_path)
    with tiny_engine(tiny_model_dir, max_num_batched_tokens=2048, kv_cache_dtype="fp8", **arguments) as llm:
        for n in LENGTHS:
            (answer,) = serve(llm, [Ask(token_ids(n), STEPS, sampling={"logprobs": -1})])
            replay = reference.replay(token_ids(n), replace(case.rule, itemsize=1), STEPS)
            assert isinstance(replay.watcher, Selection) == (n > 63)
            assert_same_distributions(answer.logprobs, replay.logits)
