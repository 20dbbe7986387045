"""Requests that select from the host, held to their reference step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine_tools import ROUNDING, Answer, Snapshot
from reference import Reference, Replay
from reference_hosted import Hosted
from reference_yakv import Selecting

COARSE = 2e-2
"""As ROUNDING, where K and V of 4 bits differ: a value in the middle of two codes may get either."""


def check_steps(
    reference: Reference,
    rule: Selecting | Hosted,
    prompt: list[int],
    answer: Answer,
    snapshots: Sequence[Snapshot],
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
