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
    runtime,
    scheduler,
    serve,
    tiny_engine,
    token_ids,
)
from option_tools import EVERYTHING, assert_idle
from reference import Reference
from reference_hosted import Selection
from selection_tools import WatchHosted, check_hosted

# Within the window, too short to gain by the host, around pages and cuts; 257: the last chunk is one token.
LENGTHS = (20, 33, 90, 257, 300, 511, 700)
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


@pytest.mark.parametrize("chunk", [100, 256, 2048])
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
    assert len(selections) >= 4 and sum(s.swaps for s in selections) < 10
    counts = {len(head) for layer in selections[-1].hosted for head in layer}
    assert len(counts) > 1, "heads have admitted equally many tokens: the comparison shows little"
