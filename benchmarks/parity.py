"""Tokens of a policy whose budgets hold the whole context, against stock vLLM's.

    python -m benchmarks.parity MODEL --out FILE [--dtype float32] [--graphs]

On CUDA, `--graphs` adds engines with captured decode graphs; without it everything is eager.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.engine import engine, greedy, scheduler

LENGTHS = (5, 16, 17, 64, 224, 256, 257, 365, 513, 811, 1200, 1500)
NEW_TOKENS = 32
WHOLE = {
    "streaming": {"window": 4096},
    "snapkv": {"ratio": 1.0},
    "random": {"ratio": 1.0},
    "heterocache": {"rho": 1.0},
}
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}


def prompts(model: str) -> list[list[int]]:
    """Token-id prompts of the given lengths, cut from this package's own sources."""
    from transformers import AutoTokenizer

    root = Path(__file__).parent.parent
    text = "\n".join(path.read_text() for path in sorted((root / "vllm_kvplug").rglob("*.py")))
    ids = AutoTokenizer.from_pretrained(model)(text)["input_ids"]
    return [ids[i * 613 : i * 613 + length] for i, length in enumerate(LENGTHS)]


def mismatches(tokens: list[list[int]], stock: list[list[int]]) -> int:
    """Tokens that differ, position by position."""
    return sum(a != b for mine, theirs in zip(tokens, stock, strict=True) for a, b in zip(mine, theirs, strict=True))


def run(llm: Any, asked: list[list[int]], together: bool) -> list[list[int]]:
    if together:
        return greedy(llm, asked, NEW_TOKENS)
    return [greedy(llm, [prompt], NEW_TOKENS)[0] for prompt in asked]


def count_preemptions(llm: Any) -> list[int]:
    """A list that grows by one entry whenever the scheduler preempts a request."""
    seen: list[int] = []
    owner = scheduler(llm)
    stock = owner._preempt_request

    def counted(*args: Any, **kwargs: Any) -> None:
        seen.append(1)
        stock(*args, **kwargs)

    owner._preempt_request = counted
    return seen


TINY_POOL = {"num_gpu_blocks_override": 104, "max_model_len": 1600}
"""Holds the longest prompt with its answer, and little more."""


def cases(graphs: bool) -> list[tuple[str, dict[str, Any], bool]]:
    """(name, engine arguments, all prompts at once)."""
    eager = {"enforce_eager": True}
    found = [
        ("chunked, together", {**eager, "max_num_batched_tokens": 256}, True),
        ("whole prompts, one by one", {**eager, "max_num_batched_tokens": 2048}, False),
        (
            "tiny pool",
            {**eager, "max_num_batched_tokens": 512, **TINY_POOL},
            True,
        ),
    ]
    if graphs:
        found += [
            ("graphs, chunked, together", {"compilation_config": GRAPHS, "max_num_batched_tokens": 256}, True),
            ("graphs, one by one", {"compilation_config": GRAPHS, "max_num_batched_tokens": 2048}, False),
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--policies", nargs="*", default=list(WHOLE))
    args = parser.parse_args()
    asked = prompts(args.model)
    common = {"dtype": args.dtype, "max_model_len": 2048, "max_num_seqs": 8}
    rows: list[dict[str, Any]] = []
    for case, arguments, together in cases(args.graphs):
        stock_arguments = {k: v for k, v in arguments.items() if k != "num_gpu_blocks_override"}
        with engine(args.model, **{**common, **stock_arguments}) as llm:
            stock = run(llm, asked, together)
        for policy in args.policies:
            chosen = {"kv_policy": policy, "kv_policy_config": WHOLE[policy]}
            with engine(args.model, **{**common, **arguments, **chosen}) as llm:
                preemptions = count_preemptions(llm)
                tokens = run(llm, asked, together)
            row = {
                "case": case,
                "policy": policy,
                "prompts": len(asked),
                "tokens": sum(map(len, tokens)),
                "mismatched_tokens": mismatches(tokens, stock),
                "preemptions": len(preemptions),
            }
            rows.append(row)
            print(row, flush=True)
            names = ("prompts", "tokens", "mismatched_tokens", "preemptions")
            metrics = {f"parity.{name}": sum(row[name] for row in rows) for name in names}
            report.write(args.out, report.result(f"parity {args.dtype}", metrics, rows))  # a stop loses one run only


if __name__ == "__main__":
    main()
