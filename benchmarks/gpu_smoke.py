"""First runs on a GPU: stock vLLM's tokens under a policy that keeps everything, and eager = captured graphs.

    python -m benchmarks.gpu_smoke MODEL --out FILE [--dtype bfloat16]

Greedy tokens of two bf16 attention kernels may part where two logits tie within rounding, so each row also
gives stock's margin (difference of the two best log-probabilities) at the first token that differs, and how
often stock differs from itself between eager mode and graphs.
"""

from __future__ import annotations

import argparse
import traceback
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.engine import engine
from benchmarks.parity import GRAPHS, NEW_TOKENS, mismatches, prompts

MODES = {"eager": {"enforce_eager": True}, "graph": {"compilation_config": GRAPHS}}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("streaming, window over context", {"kv_policy": "streaming", "kv_policy_config": {"window": 4096}}),
    ("snapkv, everything kept", {"kv_policy": "snapkv", "kv_policy_config": {"ratio": 1.0}}),
    ("streaming, window 128", {"kv_policy": "streaming", "kv_policy_config": {"window": 128}}),
    ("snapkv, half kept", {"kv_policy": "snapkv"}),
    ("heterocache, half kept", {"kv_policy": "heterocache"}),
]


def generate(llm: Any, asked: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy tokens, and at each the margin between the two best log-probabilities."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, logprobs=2)
    outputs = [o.outputs[0] for o in llm.generate([{"prompt_token_ids": p} for p in asked], params, use_tqdm=False)]
    tokens = [list(o.token_ids) for o in outputs]
    best = [[sorted((x.logprob for x in step.values()), reverse=True)[:2] for step in o.logprobs] for o in outputs]
    return tokens, [[a - b for a, b in steps] for steps in best]


def margins_at_divergence(tokens: Any, stock: Any, margins: Any) -> list[float]:
    """Stock's margin at the first differing token of each prompt that differs."""
    found = []
    for mine, theirs, gaps in zip(tokens, stock, margins, strict=True):
        first = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)
        if first is not None:
            found.append(round(gaps[first], 4))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    asked = prompts(args.model)
    common = {"dtype": args.dtype, "max_model_len": 2048, "max_num_seqs": 8, "max_num_batched_tokens": 512}
    common["gpu_memory_utilization"] = 0.3
    rows: list[dict[str, Any]] = []
    metrics: dict[str, float] = {}
    stock: dict[str, Any] = {}
    seen: dict[str, Any] = {}
    for mode, arguments in MODES.items():
        with engine(args.model, **common, **arguments) as llm:
            stock[mode] = generate(llm, asked)
        for name, policy in CASES:
            try:
                with engine(args.model, **common, **arguments, **policy) as llm:
                    tokens, _ = generate(llm, asked)
            except Exception:  # a broken case must not hide the others' results
                traceback.print_exc()
                rows.append({"mode": mode, "case": name, "error": traceback.format_exc()[-400:]})
                continue
            row = {"mode": mode, "case": name, "tokens": sum(map(len, tokens))}
            if "128" not in name and "half" not in name:
                row["mismatched_tokens"] = mismatches(tokens, stock[mode][0])
                row["margins"] = margins_at_divergence(tokens, *stock[mode])
                if name.startswith("streaming"):
                    metrics[f"gpu_smoke.{mode}_mismatched_tokens"] = row["mismatched_tokens"]
            if name in seen:
                row["differs_from_eager"] = mismatches(tokens, seen[name])
            seen.setdefault(name, tokens)
            rows.append(row)
            print(row, flush=True)
    own = mismatches(stock["graph"][0], stock["eager"][0])
    metrics["gpu_smoke.stock_graph_against_stock_eager"] = own
    metrics["gpu_smoke.tokens"] = sum(map(len, stock["eager"][0]))
    print(metrics)
    report.write(args.out, report.result(f"gpu_smoke {args.dtype}", metrics, rows))


if __name__ == "__main__":
    main()
