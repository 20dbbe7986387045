"""What gates are worth at 4,096 tokens: scores over budgets of fastkvzip and thresholds of wgkv, beside baselines.

    python -m benchmarks.gate_sweep MODEL --tasks tasks.py --out FILE [--tokens 4096] [--examples 100]
        [--keys eval multiquery] [--runs NAME ...] [--gates NAME=FILE ...] [--scores DIR] [--at-once N] [--seconds S]

Metrics are eval4096.RUN.rel and so on, and with questions that policies do not see before they cut,
multiquery4096.RUN.rel; wgkv and streaming never look ahead, so that theirs would be the same.
Runs: keep60 to keep20, fastkvzip with that percentage; tau05 to tau90, wgkv without a cap and with that threshold;
snapkv_P, streaming_P and random_P with P percent; with --scores, where `python -m benchmarks.oracle_scores` has filled
DIR/eval and, with its --multiquery, DIR/multiquery, kvzip_P, the oracle of fastkvzip's target; with --gates,
NAME_tau02 and so on, wgkv with another write gate. --runs leaves out all runs that it does not name.

admitted is the share that a write gate let in of tokens that have left the window; stored_ratio, of all tokens, has the
window in it. admit30 and admit15 are the runs of the shipped gate with the best score of those that admit no more than
that percentage, stored30 and stored15 of those that store no more, as a baseline of that budget does. What else rows
hold, and how a call goes on with another's file: benchmarks/eval_tasks.py.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from statistics import fmean

from benchmarks.eval_tasks import Examination, Runs, lanes_of
from benchmarks.lanes import Row, measure
from benchmarks.policies_table import WGKV_WINDOW, knobs_of
from vllm_kvplug.eval.prompts import WITHOUT_CONTEXT_END

KEPT = (0.6, 0.5, 0.4, 0.3, 0.2)
TAUS = (0.05, 0.1, 0.2, 0.3, 0.35, 0.4, 0.5, 0.7, 0.8, 0.9)
TAUS_OF_OTHERS = (0.02, 0.05, 0.1, 0.2)
"""Of gates that were trained to admit less."""
BASELINES = ("snapkv", "streaming", "random")
BASELINES_KEEP = (0.4, 0.3, 0.15)
ORACLE_KEEPS = (0.4, 0.3, 0.2)
SHARES = (0.3, 0.15)


def percent(share: float) -> str:
    return f"{round(100 * share):02d}"


def runs_of(tokens: int, model: str, gates: dict[str, str], scores: Path | None) -> Runs:
    runs: Runs = {f"keep{percent(kept)}": ("fastkvzip", {"ratio": kept}) for kept in KEPT}
    runs |= {f"tau{percent(tau)}": ("wgkv", {"tau": tau}) for tau in TAUS}
    for name, gate in gates.items():
        runs |= {f"{name}_tau{percent(tau)}": ("wgkv", {"tau": tau, "gate": gate}) for tau in TAUS_OF_OTHERS}
    for policy in BASELINES:
        for kept in BASELINES_KEEP:
            runs[f"{policy}_{percent(kept)}"] = (policy, knobs_of(policy, kept, tokens, model))
    if scores is not None:
        runs |= {f"kvzip_{percent(kept)}": ("oracle", {"ratio": kept, "scores": str(scores)}) for kept in ORACLE_KEEPS}
    return runs


def admission_metrics(rows: list[Row], metrics: dict[str, float]) -> dict[str, float]:
    """What the gate admitted in every run of wgkv, and the best runs within SHARES under names of their own."""
    found: dict[str, float] = {}
    gated = [row for row in rows if row.get("policy") == "wgkv" and "error" not in row]
    for row in gated:
        window = WGKV_WINDOW / row["prompt_tokens"]
        found[f"{row['key']}.{row['run']}.admitted"] = max(row["stored_ratio"] - window, 0) / (1 - window)
    all_metrics = metrics | found
    for key, (what, counted), most in product(
        dict.fromkeys(row["key"] for row in gated), (("admit", "admitted"), ("stored", "stored_ratio")), SHARES
    ):
        shipped = (row for row in gated if row["key"] == key and "gate" not in row["knobs"])
        runs = [row for row in shipped if all_metrics[f"{key}.{row['run']}.{counted}"] <= most]
        if runs:
            best = max(runs, key=lambda row: fmean(row["scores"]))
            old, new = f"{key}.{best['run']}.", f"{key}.{what}{percent(most)}."
            found |= {new + k.removeprefix(old): v for k, v in all_metrics.items() if k.startswith(old)}
            found[f"{new}tau"] = best["knobs"]["tau"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Examination.add_arguments(parser, examples=100)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--keys", nargs="+", choices=["eval", "multiquery"], default=["eval", "multiquery"])
    parser.add_argument("--runs", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--gates", nargs="+", default=[], metavar="NAME=FILE", help="more write gates")
    parser.add_argument("--scores", type=Path, metavar="DIR", help="of the oracle, for prompts and for contexts")
    parser.add_argument("--seconds", type=float, help="leave out what has not ended by then")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    lanes, gates = [], dict(given.split("=", 1) for given in args.gates)
    for key in args.keys:
        runs = runs_of(args.tokens, args.model, gates, args.scores and args.scores / key / "kvzip")
        multiquery = key == "multiquery"
        if multiquery:
            runs = {name: run for name, run in runs.items() if run[0] not in WITHOUT_CONTEXT_END}
        if args.runs:
            runs = {name: run for name, run in runs.items() if name in args.runs}
        lanes += lanes_of(Examination.of(args, args.tokens, multiquery), runs)
    measure(lanes, args.out, args.seconds, title=f"gates{args.tokens} {args.dtype}", derive=admission_metrics)


if __name__ == "__main__":
    main()
