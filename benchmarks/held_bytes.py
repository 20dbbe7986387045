"""KV bytes that a prompt holds once it is complete, under heterocache and in stock vLLM, from vLLM's block pool.

    python -m benchmarks.held_bytes MODEL --out FILE [--tokens 1500] [--rho 0.5]

Also: how many kept pages lie in another layer's part of their block, and whether the blocks given back carry a
request that stock vLLM cannot hold beside the first. CPU only: the pool is read in this process.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.engine import block_bytes, engine, greedy, runtime, scheduler, used_blocks
from benchmarks.parity import prompts
from vllm_kvplug.placement.integrity import head_pages

GIB = 1 << 30


def start(llm: Any, name: str, prompt: list[int], new_tokens: int) -> None:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)


def step_until(llm: Any, tokens: int) -> None:
    """Step until every running request has produced `tokens` tokens."""
    while True:
        llm.llm_engine.step()
        running = scheduler(llm).running
        if running and all(r.num_output_tokens >= tokens for r in running):
            return


def after_prompt(llm: Any, prompt: list[int]) -> dict[str, float]:
    """Blocks and bytes at the peak of the prompt and once decoding goes on."""
    start(llm, "a", prompt, 16)
    peak = 0
    while not (scheduler(llm).running and scheduler(llm).running[0].num_output_tokens >= 1):
        llm.llm_engine.step()
        peak = max(peak, used_blocks(llm))
    step_until(llm, 4)
    held = used_blocks(llm)
    return {"peak_blocks": peak, "held_blocks": held, "held_bytes": held * block_bytes(llm)}


def foreign_pages(llm: Any) -> tuple[int, int]:
    """(pages outside their own layer's part of a block, all pages) of the only live request."""
    worker = runtime(llm)
    (request,) = worker.live.values()
    heads, per_layer = worker.geometry.heads, worker.geometry.kv_heads
    pages = [(h, p) for h in range(heads) for p in head_pages(worker.tables, request.slot, h)]
    return sum(p % heads // per_layer != h // per_layer for h, p in pages), len(pages)


def most_running(llm: Any, asked: list[list[int]], new_tokens: int = 64) -> int:
    """Most requests that decode together when all are submitted at once."""
    for i, prompt in enumerate(asked):
        start(llm, f"r{i}", prompt, new_tokens)
    most = 0
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        most = max(most, sum(r.num_output_tokens > 0 for r in scheduler(llm).running))
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--rho", type=float, default=0.5)
    args = parser.parse_args()
    prompt = (prompts(args.model)[-1] * (args.tokens // 1500 + 1))[: args.tokens]
    common = {"dtype": "float32", "max_model_len": 2048, "max_num_seqs": 8, "enforce_eager": True}
    common |= {"max_num_batched_tokens": 512, "enable_prefix_caching": False}
    policy = {"kv_policy": "heterocache", "kv_policy_config": {"rho": args.rho}}
    with engine(args.model, **common) as llm:
        stock = after_prompt(llm, prompt)
        stock_block, stock_size = block_bytes(llm), scheduler(llm).cache_config.block_size
    with engine(args.model, **common, **policy) as llm:
        ours = after_prompt(llm, prompt)
        foreign, pages = foreign_pages(llm)
        worker, blocks = runtime(llm), scheduler(llm).kv_cache_config.num_blocks
        arena = worker.charges.fixed + worker.charges.per_block * blocks
        per_block = worker.charges.per_block
        block = block_bytes(llm)
    # A pool for one prompt at a time in stock vLLM, of the same bytes for both.
    pool = int(1.75 * args.tokens / stock_size) * stock_block
    asked = [prompt, list(reversed(prompt))]
    with engine(args.model, **common, num_gpu_blocks_override=pool // stock_block) as llm:
        together_stock = most_running(llm, asked)
    with engine(args.model, **common, **policy, num_gpu_blocks_override=pool // (block + per_block)) as llm:
        together = most_running(llm, asked)
        greedy(llm, [prompt[:5]], 2)  # the pool still serves
        assert used_blocks(llm) == 0
    prefix = f"bytes.heterocache_rho{round(100 * args.rho)}"
    metrics = {
        f"{prefix}.after_shrink_ratio": ours["held_bytes"] / stock["held_bytes"],
        f"{prefix}.after_shrink_ratio_with_tables": ours["held_blocks"] * (block + per_block) / stock["held_bytes"],
        f"{prefix}.pages_in_foreign_layers": foreign / pages,
        f"{prefix}.decoding_together": together,
        "bytes.stock.decoding_together": together_stock,
    }
    rows = [
        {"run": "stock", "block_bytes": stock_block, **stock},
        {"run": "heterocache", "block_bytes": block, "table_bytes_per_block": per_block, "arena_bytes": arena, **ours},
        {"run": "shared pool", "bytes": pool, "decoding_together": together, "stock": together_stock},
    ]
    print(metrics)
    report.write(args.out, report.result(f"held bytes {args.tokens}", metrics, rows))


if __name__ == "__main__":
    main()
