"""Prefill time and time per output token of long requests, under a policy and in stock vLLM, on one GPU.

    python -m benchmarks.throughput MODEL --out FILE [--engines stock_bf16 stock_fp8 keep20] [--shapes 131072x1 32768x8]

Random weights do (`load_format='dummy'`): MODEL may be a folder with a config.json alone. Engines run one after another
in processes of their own. TPOT is the time between the first and the last token of a request over the tokens between;
of a batch it is the median, counted from when the last prompt was done.
"""

from __future__ import annotations

import argparse
import traceback
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import report
from benchmarks.engine import engine

POLICY = {"kv_policy": "synthetic", "kv_policy_config": {"ratio": 0.2}}
ENGINES: dict[str, dict[str, Any]] = {
    "stock_bf16": {},
    "stock_fp8": {"kv_cache_dtype": "fp8"},
    "keep20": POLICY,
    "keep100": {"kv_policy": "synthetic", "kv_policy_config": {"ratio": 1.0, "full_heads": 1.0}},
}
OUTPUT_TOKENS = 65
COMMON: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "enable_prefix_caching": False,
    "max_num_batched_tokens": 16_384,
    "max_num_seqs": 32,
    "gpu_memory_utilization": 0.9,
    "disable_log_stats": False,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32],
    },
}


def prompts(tokens: int, count: int) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": [(7 * i + 13 * j) % 100_000 + 5 for i in range(tokens)]} for j in range(count)]


def times(llm: Any, tokens: int, count: int) -> dict[str, float]:
    """Seconds until the last prompt was done, and milliseconds per output token from then on."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False)
    stats = [o.metrics for o in llm.generate(prompts(tokens, count), params, use_tqdm=False)]
    begun, all_in = min(s.scheduled_ts for s in stats), max(s.first_token_ts for s in stats)
    # Earlier requests of a batch decode while later prompts are computed; only what comes after counts.
    per_token = [1000 * (s.last_token_ts - s.first_token_ts) / (OUTPUT_TOKENS - 1) for s in stats]
    last = max(stats, key=lambda s: s.first_token_ts)
    tpot = 1000 * (last.last_token_ts - last.first_token_ts) / (OUTPUT_TOKENS - 1)
    return {"prefill_s": all_in - begun, "tpot_ms": tpot, "median_tpot_ms": median(per_token)}


def shape(text: str) -> tuple[int, int]:
    tokens, count = text.split("x")
    return int(tokens), int(count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["stock_bf16", "stock_fp8", "keep20"])
    parser.add_argument("--shapes", nargs="+", default=["1000x1", "16384x1", "131072x1", "32768x8"])
    args = parser.parse_args()
    longest = max(shape(s)[0] for s in args.shapes) + OUTPUT_TOKENS
    metrics: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    for name in args.engines:
        try:
            with engine(args.model, **COMMON, max_model_len=longest, **ENGINES[name]) as llm:
                times(llm, 1000, 1)  # compiles what is left to compile
                for text in args.shapes:
                    found = times(llm, *shape(text))
                    metrics |= {f"{name}.{text}.{key}": round(value, 3) for key, value in found.items()}
                    rows.append({"engine": name, "shape": text, **found})
                    print(rows[-1], flush=True)
        except Exception:  # one engine that fails must not hide the others
            rows.append({"engine": name, "error": traceback.format_exc()[-400:]})
            print(rows[-1], flush=True)
        report.write(args.out, report.result("throughput", metrics, rows))


if __name__ == "__main__":
    main()
