"""What landmarks are worth at 8,192 tokens: scores over the share of a prompt that each query attends to.

    python -m benchmarks.selection_sweep MODEL --tasks tasks.py --out FILE [--tokens 8192] [--examples 100]
        [--at-once N] [--seconds S]

Metrics are eval8192.RUN.rel and so on. Runs end in _1_6, _3 and _6, for 1.6%, 3.1% and 6.2%: yakv, with landmarks of 2
bits; residual, yakv with means and residuals for landmarks; shadowkv_landmarks, with means of 8 keys, and K and V as
they were; quest, whose pages of 16 tokens are chosen by bounds. The share is a policy's own `ratio`: beside it a query
of yakv and shadowkv_landmarks attends to the last 64 and 32 prompt tokens, and quest's first two layers to everything.
What else rows hold, and how a call goes on with another's file: benchmarks/eval_tasks.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.eval_tasks import Examination, Runs, lanes_of
from benchmarks.lanes import measure

SHARES = {"1_6": 0.015625, "3": 0.03125, "6": 0.0625}
POLICIES: Runs = {
    "yakv": ("yakv", {}),
    "residual": ("yakv", {"landmarks": "residual"}),
    "shadowkv_landmarks": ("shadowkv_landmarks", {}),
    "quest": ("quest", {}),
}


def runs_of() -> Runs:
    return {
        f"{name}_{percent}": (policy, {**knobs, "ratio": share})
        for name, (policy, knobs) in POLICIES.items()
        for percent, share in SHARES.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Examination.add_arguments(parser, examples=100)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--seconds", type=float, help="leave out what has not ended by then")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    lanes = lanes_of(Examination.of(args, args.tokens), runs_of())
    measure(lanes, args.out, args.seconds, title=f"selection{args.tokens} {args.dtype}")


if __name__ == "__main__":
    main()
