"""YAKV in the engine: what every query attends to and what comes of it, as the reference; and the life of its requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import ANGLES
from engine_tools import (
    ROUNDING,
    Answer,
    Ask,
    Snapshot,
    Watch,
    one_thread,  # noqa: F401
    serve,
    tiny_engine,
    token_ids,
)
from option_tools import EVERYTHING, assert_idle
from reference import Reference, Replay
from reference_yakv import Selecting, Selection

LENGTHS = (40, 90, 100, 257, 300, 511)  # some too short to select from; 257: the prompt's last chunk is one token
STEPS = 24
COARSE = 2e-2
"""As ROUNDING, where K and V of 4 bits differ: a value in the middle of two codes may get either."""


@pytest.fixture(scope="module")
def reference(tiny_model_dir: Path) -> Reference:
    return Reference(tiny_model_dir)


def yakv(**knobs: Any) -> dict[str, Any]:
    return {"kv_policy": "yakv", "kv_policy_config": {"host_gib": 0.05, **knobs}}


def check_steps(
    reference: Reference, rule: Selecting, prompt: list[int], answer: Answer, snapshots: list[Snapshot]
) -> Replay:
    """Asserts that every step saw the reference's tokens in every head and gave its distribution."""
    stored = {s.length: s.kept for s in snapshots}
    replay = reference.replay(prompt, replace(rule, engine=stored), len(answer.tokens), force_tokens=answer.tokens)
    for length in sorted(replay.kept.keys() & stored.keys()):
        for layer, heads in enumerate(replay.kept[length]):
            for head, theirs in enumerate(heads):
                ours = set(stored[length][layer][head])
                assert ours == set(theirs), f"length {length} layer {layer} head {head}: {ours ^ set(theirs)}"
    error = (answer.logprobs - replay.logits.log_softmax(-1)).abs().amax(1)
    assert error.median() <= ROUNDING
    assert error.max() <= (ROUNDING if rule.codec == "auto" else COARSE), error
    return replay


CASES = {
    "exact-host": {"codec": "auto"},
    "paper": {},
    "sinks": {"sinks": 5, "local": 16, "ratio": 0.1},
    "capped": {"codec": "auto", "ratio": 0.2, "max_tokens": 33, "local": 20},
}


@pytest.mark.parametrize("chunk", [256, 2048])
@pytest.mark.parametrize("case", CASES)
def test_steps_equal_reference(case: str, chunk: int, tiny_model_dir: Path, reference: Reference) -> None:
    """Requests alone, then all in the same batches."""
    rule = Selecting(ANGLES, **CASES[case])
    with tiny_engine(tiny_model_dir, max_num_batched_tokens=chunk, **yakv(**CASES[case])) as llm:
        watch = Watch(llm, integrity=True)
        alone = [serve(llm, [Ask(token_ids(n), STEPS, sampling=EVERYTHING)])[0] for n in LENGTHS]
        asks = [Ask(token_ids(n), STEPS, arrives=i, sampling=EVERYTHING) for i, n in enumerate(LENGTHS)]
        mixed = serve(llm, asks)
        assert_idle(llm)
    selecting, swaps = 0, 0
    for length, one, other in zip(LENGTHS, alone, mixed, strict=True):
        replay = check_steps(reference, rule, token_ids(length), one, watch.snapshots[one.request_id])
        seen, again = watch.snapshots[one.request_id], watch.snapshots[other.request_id]
        if (one.tokens, {s.length: s.kept for s in seen}) != (other.tokens, {s.length: s.kept for s in again}):
            check_steps(reference, rule, token_ids(length), other, again)
        if isinstance(replay.watcher, Selection):
            selecting, swaps = selecting + 1, swaps + replay.watcher.swaps
    assert selecting >= 4 and swaps < 10
