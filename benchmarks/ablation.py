"""What HeteroCache's parts are worth: whole, without retrieval, and without allocation by stability.

    python -m benchmarks.ablation MODEL --tasks tasks.py --out FILE [--tokens 2048] [--examples 40] [--rho 0.5 0.4]
        [--profile FILE] [--knobs JSON]

Without allocation every compressed head has the same budget. The trigger rate is triggers per pivot and decoded
token of the whole policy at the first rho.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.eval_tasks import Examination, Runs, lanes_of
from benchmarks.lanes import measure
from vllm_kvplug.calibrate.profile import HeadProfile, find_shipped, model_fingerprint


def profile_of(model: str, given: Path | None) -> HeadProfile:
    """The profile in `given`, or the one that is shipped for the model."""
    from transformers import AutoConfig

    found = given or find_shipped(model_fingerprint(AutoConfig.from_pretrained(model)))
    if found is None:
        raise SystemExit(f"no head profile is shipped for {model}")
    return HeadProfile.load(found)


def uniform(profile: HeadProfile) -> HeadProfile:
    """The same roles with the same budget for every compressed head."""
    weights = tuple(tuple(1.0 if weight >= 0 else weight for weight in row) for row in profile.weights)
    return HeadProfile.model_validate({**profile.model_dump(), "weights": weights})


def runs_of(rhos: list[float], knobs: dict[str, Any], uniform_profile: Path) -> Runs:
    runs: Runs = {}
    for rho in rhos:
        suffix, whole = "" if rho == rhos[0] else f"_rho{round(100 * rho)}", {**knobs, "rho": rho}
        runs[f"whole{suffix}"] = ("heterocache", whole)
        runs[f"no_retrieval{suffix}"] = ("heterocache", {**whole, "host_gib": 0})
        runs[f"no_allocation{suffix}"] = ("heterocache", {**whole, "profile": str(uniform_profile)})
    return runs


def trigger_rate(counted: dict[str, float], profile: HeadProfile, window: int) -> float:
    """Triggers per pivot and decoded token; every check compares all pivots once in `window` tokens."""
    return counted["drift_triggers"] / (counted["drift_checks"] * profile.count("pivot") * window)


def add_trigger_rate(out: Path, profile: HeadProfile, window: int) -> None:
    content: dict[str, Any] = json.loads(out.read_text())
    (counted,) = [row["counted"] for row in content["rows"] if row["run"] == "whole"]
    content["metrics"]["trigger_rate"] = trigger_rate(counted, profile, window)
    report.write(out, content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Examination.add_arguments(parser, examples=40)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rho", type=float, nargs="+", default=[0.5, 0.4])
    parser.add_argument("--profile", type=Path, help="instead of the shipped one")
    parser.add_argument("--knobs", type=json.loads, default={}, help="of all runs, as JSON")
    args = parser.parse_args()
    profile = profile_of(args.model, args.profile)
    knobs = {**args.knobs, **({"profile": str(args.profile)} if args.profile else {})}
    even = args.out.with_name("uniform_profile.json")
    uniform(profile).save(even)
    examination = Examination.of(args, args.tokens)
    measure(lanes_of(examination, runs_of(args.rho, knobs, even), key=f"ablation{args.tokens}"), args.out)
    add_trigger_rate(args.out, profile, args.knobs.get("drift_window", 5))


if __name__ == "__main__":
    main()
