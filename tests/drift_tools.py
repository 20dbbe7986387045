"""Rules and comparisons for requests whose pivots drift; model and profile are those of benchmarks.drift_model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from engine_tools import Answer, Snapshot, check_logprobs, equal_up_to_ties
from reference import Reference
from reference_drift import Drift, HeteroCacheDrift

from benchmarks.drift_model import PROFILE


def rule(**fields: Any) -> HeteroCacheDrift:
    return HeteroCacheDrift(**{"profile": PROFILE, "rho": 0.6, "threshold": 0.42, **fields})


def knobs(profile: Path, rule: HeteroCacheDrift, **more: Any) -> dict[str, Any]:
    """The engine's knobs for a rule of the reference."""
    return {
        "rho": rule.rho,
        "profile": str(profile),
        "tau_drift": rule.threshold,
        "land_after": rule.land_after,
        "as_released": rule.released,
        "host_gib": 0.05,
        **more,
    }


def check_steps(
    reference: Reference, rule: HeteroCacheDrift, prompt: list[int], answer: Answer, snapshots: list[Snapshot]
) -> Drift:
    """Asserts that every step of a request saw the reference's tokens in every head, and gave its distribution."""
    stored = {s.length: s.kept for s in snapshots}
    replay = reference.replay(prompt, replace(rule, engine=stored), len(answer.tokens))
    context = len(prompt[: rule.context_end])
    assert equal_up_to_ties(stored[context], replay), "scores tie in this example: choose another"
    assert replay.kept.keys() - stored.keys() <= {*range(context, len(prompt))}, "not seen at the end of a step"
    for length in replay.kept.keys() & stored.keys():
        kept = replay.kept[length]
        for layer in range(len(kept)):
            for head in range(len(kept[layer])):
                ours, theirs = set(stored[length][layer][head]), set(kept[layer][head])
                where = f"length {length} layer {layer} head {head}"
                assert ours == theirs, f"{where}: kept {ours - theirs}, the reference {theirs - ours}"
    check_logprobs(answer, replay)
    assert isinstance(replay.watcher, Drift)
    return replay.watcher
