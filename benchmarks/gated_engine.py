"""What policies with a gate cost and bring in whole engines on one GPU, beside stock vLLM in the same run.

    python -m benchmarks.gated_engine MODEL --out FOLDER [--policies wgkv fastkvzip] [--shapes 131072 220000]

Random weights do: MODEL may be a folder with a config.json alone. Every engine has a process of its own, of which
--at-once start and share the GPU's memory, while one at a time works. It computes one request at a time, of each number
of tokens in --shapes; FOLDER/wgkv.json and FOLDER/fastkvzip.json are written after each. Where a policy is compared
with another than stock vLLM, it is at the first shape alone.

    bf16         stock vLLM
    wgkv         stores a fifth of the prompt, the window of 256 tokens counted in; `cap` is as much
    fastkvzip    ratio 0.3, cut every 16,000 tokens, with a gate of random weights
    synthetic    keeps as much with no gate: what a policy's decode step takes beyond its, the gate takes

The write gate has random weights and as many hidden units as Llama's (4d). On a model of random weights its decisions
mean nothing, so its output biases are set on a short prompt, in the running engine, to let through of each head what
`synthetic` keeps of it: some heads whole, most a few percent. It sees keys before RoPE alone, so that this share is the
same at all positions. Then, in the same engine, prompts are computed behind a gate that lets everything through, which
only the cap holds (`cap`), and with tokens admitted by their positions and no gate (`gate.prefill_overhead`).

Times are the least of --repeats, at the first shape, or of one request: seconds to the first token, and the median time
between tokens. Blocks are the most that were taken from vLLM's pool up to the first token; what is stored is counted in
the page tables then.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import traceback
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks import report
from benchmarks.engine import Turns, engine, side_by_side
from benchmarks.gpu_engine import COMMON, OUTPUT_TOKENS, prompts, run
from vllm_kvplug import compat
from vllm_kvplug.calibrate.profile import ProfiledModel
from vllm_kvplug.policies.base import Gate
from vllm_kvplug.policies.synthetic import Synthetic, SyntheticConfig
from vllm_kvplug.tiny import random_gate

SHARES = {"wgkv": 0.2, "fastkvzip": 0.3}
TAU = 0.5
"""Of the write gate, where its logit is 0."""

CAPPED, WHOLE = 0.5, 1.25
"""A pool's bytes relative to the K and V of the longest prompt: where a cap holds from start to end, and where vLLM
wants to see that a long answer fits, which is kept whole. Page tables come out of it."""

Row = dict[str, Any]


def pool(name: str, model: str, tokens: int) -> dict[str, float]:
    """A pool for one request of `tokens` tokens, so that several engines fit a GPU."""
    if torch.version.cuda is None:
        return {}
    config = AutoConfig.from_pretrained(model)
    one = ProfiledModel.of(config, model)
    whole = tokens * 2 * one.layers * one.kv_heads * one.head_dim * 2
    share = CAPPED if name == "wgkv" else WHOLE
    return {"kv_cache_memory_bytes": int(share * whole), "gpu_memory_utilization": 0.1}


def arguments(name: str, model: str, folder: Path, cut_every: int) -> dict[str, Any]:
    """What an engine is told beside what all are; a gate is written to `folder`."""
    kind, _, policy = name.partition(" ")
    if kind == "bf16":
        return {}
    if kind == "synthetic":
        return {"kv_policy": kind, "kv_policy_config": {"ratio": SHARES[policy]}}
    knobs: dict[str, Any] = {"gate": str(random_gate(Path(model), folder / "gate.safetensors", kind, hidden=None))}
    if kind == "wgkv":
        knobs |= {"tau": TAU, "cap": SHARES[kind], "cut_every": cut_every}
    else:
        knobs |= {"ratio": SHARES[kind]}
    return {"kv_policy": kind, "kv_policy_config": knobs}


# ---- what runs in the worker, whose process is the scheduler's


def count_blocks(worker: Any) -> None:
    """Count from 0 how many of the pool's blocks are in use at most."""
    from vllm.v1.core.block_pool import BlockPool

    pool: Any = BlockPool
    if not hasattr(pool, "most_used"):
        take = pool.get_new_blocks

        def counting(self: Any, count: int) -> Any:
            taken = take(self, count)
            pool.most_used = max(pool.most_used, self.num_gpu_blocks - 1 - self.get_num_free_blocks())
            return taken

        pool.get_new_blocks = counting
    pool.most_used = 0


def held(worker: Any) -> Row:
    """Blocks and bytes since `count_blocks`, and what the heads of the only request store."""
    from vllm.v1.core.block_pool import BlockPool

    pool: Any = BlockPool
    shape, size = compat.model_shape(worker.vllm_config), worker.vllm_config.cache_config.block_size
    found = {"blocks": pool.most_used, "block_bytes": shape.heads * size * 2 * shape.head_dim * shape.page_itemsize}
    runtime = compat.runtime_or_none(worker.vllm_config)
    if runtime is None:
        return found
    (request,) = runtime.live.values()
    lengths = runtime.tables.lengths[request.slot].sort().values.tolist()
    return found | {"table_bytes_per_block": runtime.charges.per_block, "tokens_of_heads": lengths}


class Recorder:
    """The write gate, reading keys before RoPE alone, which remembers the logits of a prompt of one chunk."""

    @torch.no_grad()
    def __init__(self, gate: Any):
        self.gate = gate
        self.logits: dict[int, torch.Tensor] = {}
        for weight in (gate.gate.norm_rope, gate.gate.b1, gate.gate.b2):
            weight.zero_()

    def rows(self, layer: int) -> None:
        return None

    def score(self, layer: int, *given: Any) -> torch.Tensor:
        scores = self.gate.score(layer, *given)
        self.logits[layer] = scores.double().logit(eps=1e-7).T
        return scores

    @torch.no_grad()
    def let_through(self, shares: torch.Tensor) -> None:
        """Set output biases so that the tokens with the largest logits score above TAU: `shares` [layers, heads]."""
        logits = torch.stack([self.logits[layer] for layer in range(len(self.logits))]).sort(descending=True).values
        first, last = logits[..., :1], logits[..., -1:]
        ends = torch.cat([2 * first - last, logits, 2 * last - first], -1)  # beyond what was seen: none, and all
        count = (shares.to(ends.device) * logits.shape[-1]).round().long()[..., None]
        self.gate.gate.b2.copy_(-(ends.gather(-1, count) + ends.gather(-1, count + 1))[..., 0] / 2)


class Drawn:
    """In the gate's place: as many tokens of each head, by their positions."""

    def __init__(self, shares: torch.Tensor, device: torch.device):
        self.limits = (shares * (1 << 24)).long().to(device)
        self.heads = torch.arange(self.limits.shape[1], device=device)

    def rows(self, layer: int) -> None:
        return None

    def score(
        self, layer: int, key: torch.Tensor, position: torch.Tensor, projected: torch.Tensor | None
    ) -> torch.Tensor:
        drawn = position[:, None] * 2_654_435_761 + (layer * 131 + self.heads) * 40_503
        return (drawn % (1 << 24) < self.limits[layer]).float()


def record(worker: Any) -> None:
    worker.runtime.gate = Recorder(worker.runtime.gate)


def shares_of(worker: Any, tokens: int, share: float) -> torch.Tensor:
    """Of the tokens beyond the window, [layers, KV heads], with which a prompt stores a share of itself in all."""
    policy = worker.runtime.policy
    kept = Synthetic(SyntheticConfig(ratio=share), policy.shape).kept(tokens)
    window = policy.local.tokens
    return ((torch.tensor(kept) - window) / (tokens - window)).clamp_min(0)


def let_through(worker: Any, tokens: int, share: float) -> None:
    recorder = worker.runtime.gate
    recorder.let_through(shares_of(worker, tokens, share))
    worker.runtime.gate = recorder.gate


def leave_out_gate(worker: Any, tokens: int, share: float) -> None:
    gate: Gate = Drawn(shares_of(worker, tokens, share), worker.runtime.device)
    worker.runtime.gate = gate


# ---- one engine


def request(llm: Any, tokens: int, outputs: int) -> Row:
    """Time, blocks and stored tokens of one prompt; time between the tokens of its answer if there are several."""
    from vllm import SamplingParams

    llm.collective_rpc(count_blocks)
    params = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True, detokenize=False)
    begun, arrived, row = time.perf_counter(), [], {}
    llm.llm_engine.add_request("only", prompts(tokens, 1)[0], params)
    while llm.llm_engine.has_unfinished_requests():
        if llm.llm_engine.step():
            arrived.append(time.perf_counter())
            row = row or llm.collective_rpc(held)[0]
    gaps = [1000 * (after - before) for before, after in zip(arrived[1:], arrived[2:], strict=False)]
    return {"tokens": tokens, "prefill_s": arrived[0] - begun, **({"tpot_ms": median(gaps)} if gaps else {}), **row}


def best(llm: Any, tokens: int, outputs: int, repeats: int) -> Row:
    """The request's row with the least times of several, which are all in it."""
    rows = [request(llm, tokens, outputs) for _ in range(repeats)]
    times = {name: [round(row[name], 5) for row in rows] for name in ("prefill_s", "tpot_ms") if name in rows[0]}
    return rows[0] | {name: min(column) for name, column in times.items()} | {"all": times}


def calibrate(llm: Any, tokens: int, share: float) -> None:
    llm.collective_rpc(record)
    run(llm, 1000, 1, outputs=1)
    llm.collective_rpc(let_through, args=(tokens, share))


def measure(
    model: str,
    common: dict[str, Any],
    name: str,
    shapes: list[int],
    outputs: int,
    repeats: int,
    cut_every: int,
    turns: Turns,
) -> list[Row]:
    """Rows of one engine, of every shape and variant; what fails leaves its error in its row."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions go to the worker
    kind, tokens = name.partition(" ")[0], shapes[0]
    rows: list[Row] = []

    def add(variant: str, tokens: int, outputs: int, repeats: int) -> None:
        try:
            row = best(llm, tokens, outputs, repeats)
        except Exception:  # what was measured before stays
            row = {"tokens": tokens, "error": traceback.format_exc()[-600:]}
        rows.append({"engine": name, "variant": variant, **row})
        print({key: value for key, value in rows[-1].items() if key != "tokens_of_heads"}, flush=True)

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        chosen = arguments(name, model, Path(folder), cut_every)
        longest = max(*shapes, 1000) + max(outputs, OUTPUT_TOKENS)
        with turns.together():
            given = common | pool(name, model, longest) | {"max_model_len": longest}
            llm = stack.enter_context(engine(model, **given, **chosen))
            run(llm, 1000, 1)  # compiles what is left to compile
        stack.enter_context(turns.alone())
        if kind == "wgkv":
            calibrate(llm, tokens, SHARES[kind])
        add("", tokens, outputs, repeats)
        for one in [] if kind == "synthetic" else shapes[1:]:
            add("", one, outputs, 1)
        if kind == "wgkv":
            calibrate(llm, tokens, 1.0)
            add("cap", tokens, 2, 1)
            llm.collective_rpc(leave_out_gate, args=(tokens, SHARES[kind]))
            add("no gate", tokens, 2, repeats)
    return rows


# ---- metrics


def share(row: Row) -> float:
    """Tokens that a request's heads store relative to those it has."""
    return sum(row["tokens_of_heads"]) / len(row["tokens_of_heads"]) / row["tokens"]


def metrics(policy: str, rows: list[Row]) -> dict[str, float]:
    """Of a policy's engines, as far as they have run."""
    found: dict[str, float] = {}
    by_name = {(row["engine"], row["variant"], row["tokens"]): row for row in rows if "error" not in row}
    first = next(iter(by_name.values()), {}).get("tokens")
    for (name, variant, tokens), row in by_name.items():
        if (name, variant) == (policy, ""):
            stock, synthetic = (by_name.get((other, "", tokens)) for other in ("bf16", f"synthetic {policy}"))
            found |= {f"prefill.{tokens}.s": row["prefill_s"], f"decode.{tokens}x1.tpot_ms": row["tpot_ms"]}
            found[f"stored.{tokens}"] = share(row)
            found |= against_stock(f"prefill.{tokens}", row, stock) if stock else {}
            if stock:
                found[f"decode.{tokens}x1.bf16_tpot_ms"] = stock["tpot_ms"]
            if synthetic:
                found[f"decode.{tokens}x1.synthetic_tpot_ms"] = synthetic["tpot_ms"]
                found[f"stored.{tokens}.synthetic"] = share(synthetic)
            if synthetic and tokens == first:
                found["gate.tpot_overhead"] = row["tpot_ms"] / synthetic["tpot_ms"] - 1
        if (name, variant) == (policy, "no gate") and (gated := by_name.get((policy, "", tokens))):
            found["gate.prefill_overhead"] = gated["prefill_s"] / row["prefill_s"] - 1
        if (name, variant) == (policy, "cap"):
            stock = by_name.get(("bf16", "", tokens))
            found |= {"cap.blocks": row["blocks"], "cap.stored": share(row)}
            found |= {"cap.peak_kv_ratio": of_stock(row, stock)} if stock else {}
    return found


def of_stock(row: Row, stock: Row, tables: int = 0) -> float:
    """Bytes of the most blocks in use, relative to stock's for the same prompt."""
    return row["blocks"] * (row["block_bytes"] + tables) / (stock["blocks"] * stock["block_bytes"])


def against_stock(prefix: str, row: Row, stock: Row) -> dict[str, float]:
    return {
        f"{prefix}.bf16_s": stock["prefill_s"],
        f"{prefix}.speedup_vs_bf16": stock["prefill_s"] / row["prefill_s"],
        f"{prefix}.peak_kv_ratio": of_stock(row, stock),
        f"{prefix}.peak_kv_ratio_with_tables": of_stock(row, stock, row["table_bytes_per_block"]),
    }


def write(folder: Path, policies: list[str], rows: list[Row]) -> None:
    """Every policy's file has its own engines and stock's."""
    for policy in policies:
        own = [row for row in rows if row["engine"] in ("bf16", policy, f"synthetic {policy}")]
        if any(row["engine"] != "bf16" for row in own):
            report.write(folder / f"{policy}.json", report.result(f"{policy} engines", metrics(policy, own), own))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--policies", nargs="+", choices=SHARES, default=list(SHARES))
    parser.add_argument("--shapes", type=int, nargs="+", default=[131_072, 220_000], metavar="TOKENS")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--outputs", type=int, default=257, metavar="TOKENS", help="of every answer")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--at-once", type=int, default=2, metavar="ENGINES", help="that share the GPU's memory")
    parser.add_argument("--cut-every", type=int, default=4096, metavar="TOKENS", help="between two looks at wgkv's cap")
    args = parser.parse_args()
    names = ["bf16", *args.policies, *(f"synthetic {policy}" for policy in args.policies)]
    rows: list[Row] = []
    common, rest = COMMON | {"dtype": args.dtype}, (args.shapes, args.outputs, args.repeats, args.cut_every)
    with tempfile.TemporaryDirectory() as folder:
        jobs = [partial(measure, args.model, common, name, *rest, Turns(folder)) for name in names]
        for number, outcome in side_by_side(jobs, args.at_once):
            if outcome.error:  # one engine that fails must not hide the others
                rows.append({"engine": names[number], "error": outcome.error[-600:]})
                print(rows[-1], flush=True)
            rows += outcome.value or []
            write(args.out, args.policies, rows)


if __name__ == "__main__":
    main()
