"""Every policy at two levels of memory: scores relative to full attention, bytes, and time per output token.

    python -m benchmarks.policies_table MODEL --tasks tasks.py --out FILE [--tokens 4096 8192] [--examples 40]
        [--levels 0.5 0.25] [--policies NAME ...] [--timed 16] [--at-once N] [--seconds S]

A level is the share of a prompt's tokens that a policy is told to keep, or what its own knobs come to nearest. Metrics
are POLICY@LEVEL.eval4096.rel, .rel_low, .rel_high, .mean, .gpu_kv_ratio, .stored_ratio, .host_bytes and .tpot_ms, and
the same of POLICY@LEVEL.eval8192. What they mean, and how a call goes on with another's file: benchmarks/eval_tasks.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.ablation import profile_of
from benchmarks.eval_tasks import Examination, lanes_of
from benchmarks.lanes import measure
from vllm_kvplug.policies.registry import policy_class, policy_names

NOT_COMPARED = ("oracle", "synthetic")
"""Policies that no server would run: one has seen the answers, the other looks at nothing."""

DUO_ENDS = 128 + 256
"""Tokens that duo's streaming heads keep."""

WGKV_WINDOW = 256
"""Of the shipped gate."""

LANDMARK = 1 / 14
"""Of a head of 64 values, in 2 bits: a share of its K and V in 16 bits."""


def _duo(level: float, tokens: int, model: str) -> dict[str, Any]:
    ends = DUO_ENDS / tokens
    return {"retrieval": round(max(level - ends, 0.01) / (1 - ends), 3)}


def _fastkvzip_yakv(level: float, tokens: int, model: str) -> dict[str, Any]:
    """What is selected counts, and so do landmarks of what is on the host."""
    defaults = policy_class("fastkvzip+yakv").Config()
    return {"ratio": round(level - defaults.fetch - LANDMARK * defaults.offload, 4)}


def _heterocache(level: float, tokens: int, model: str) -> dict[str, Any]:
    """Heads that the profile keeps whole may take more than the level."""
    return {"rho": max(level, profile_of(model, None).smallest_rho)}


def _wgkv(level: float, tokens: int, model: str) -> dict[str, Any]:
    return {"cap": round(max(level * tokens - WGKV_WINDOW, 1) / (tokens - WGKV_WINDOW), 3)}


def _wgkv_yakv(level: float, tokens: int, model: str) -> dict[str, Any]:
    """As if the gate admitted everything: the window, landmarks of what is on the host, and what is selected."""
    hosted = 1 - WGKV_WINDOW / tokens
    return {"ratio": round(max(level - WGKV_WINDOW / tokens - LANDMARK, 0.01) / hosted, 4)}


def _selecting(local: int) -> Callable[[float, int, str], dict[str, Any]]:
    """The last `local` tokens stay beside what is selected."""
    return lambda level, tokens, model: {"ratio": round(level - local / tokens, 4)}


KNOBS: dict[str, Callable[[float, int, str], dict[str, Any]]] = {
    "duo": _duo,
    "fastkvzip+yakv": _fastkvzip_yakv,
    "heterocache": _heterocache,
    "rkv": lambda level, tokens, model: {"decode_budget": round(level * tokens)},
    "streaming": lambda level, tokens, model: {"window": round(level * tokens) - 4},
    "shadowkv_landmarks": _selecting(32),
    "wgkv": _wgkv,
    "wgkv+quest": lambda level, tokens, model: {"budget_tokens": max(round(level * tokens), WGKV_WINDOW + 16)},
    "wgkv+snapkv": lambda level, tokens, model: {"budget": max(round(level * tokens) - WGKV_WINDOW, 16)},
    "wgkv+yakv": _wgkv_yakv,
    "yakv": _selecting(64),
}
"""Knobs for a level at a number of tokens, where they are not just the level as the knob that requests may change."""


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "expected_attention+adakv": ("expected_attention", {"allocation": "layer"}),
    "snapkv+adakv": ("snapkv", {"allocation": "layer"}),
}
"""Policies with knobs beside their level, under names of their own."""


def compared() -> list[str]:
    """Policies that can be compared, and variants of them."""
    return sorted([name for name in policy_names() if name not in NOT_COMPARED] + list(VARIANTS))


def knobs_of(policy: str, level: float, tokens: int, model: str) -> dict[str, Any]:
    """Knobs with which a policy keeps about `level` of the tokens of a prompt of `tokens` tokens."""
    if policy in KNOBS:
        return KNOBS[policy](level, tokens, model)
    knob = policy_class(policy).Config.request_knob
    if knob is None:
        raise SystemExit(f"{policy} has no single budget: say in benchmarks/policies_table.py what its levels are")
    return {knob: level}


def runs_of(policies: list[str], levels: list[float], tokens: int, model: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Policy and knobs of every run, by its name POLICY@LEVEL."""
    runs = {}
    for name in policies:
        policy, more = VARIANTS.get(name, (name, {}))
        runs |= {f"{name}@{level:g}": (policy, more | knobs_of(policy, level, tokens, model)) for level in levels}
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Examination.add_arguments(parser, examples=40)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--levels", type=float, nargs="+", default=[0.5, 0.25])
    parser.add_argument("--policies", nargs="+", default=compared(), metavar="NAME", help="default: all")
    parser.add_argument("--timed", type=int, default=16, metavar="N", help="requests at once to time; 0: none")
    parser.add_argument("--seconds", type=float, help="leave out what has not ended by then")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    lanes = []
    for tokens in args.tokens:
        runs = runs_of(args.policies, args.levels, tokens, args.model)
        lanes += lanes_of(Examination.of(args, tokens, timed=args.timed), runs)
    measure(lanes, args.out, args.seconds, title="policies", form="{run}.{key}")


if __name__ == "__main__":
    main()
