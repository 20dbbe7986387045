"""Speed and memory of engines on one GPU, under a policy and in stock vLLM, in the same run.

    python -m benchmarks.gpu_engine MODEL --out FILE [--cases decode tax concurrency saturated tail] [--engines ...]
    python -m benchmarks.gpu_engine SMALL_MODEL --out FILE --cases parity --tasks tasks.py

Random weights do, but for `parity`: MODEL may be a folder with a config.json alone. Every engine has processes of its
own, one after another but for `tax`, where requests of two engines alternate, and `parity`, where nothing is timed.

    decode       seconds to the last first token of a batch, and milliseconds per output token from then on
    tax          with budgets that keep everything, time per output token and to the first one, relative to stock
    concurrency  requests of --longest tokens that vLLM says fit, and how many of a quarter of that length really decode
                 together in a quarter of the pool; relative to stock
    saturated    output tokens per second of --saturated requests at once, prompts' own time taken off
    tail         time between output tokens of one request whose satellites all fetch anew every 40 steps; roles are
                 as common as in the HeteroCache authors' file for Llama-3.1-8B: 196 of 256 heads are
                 satellites
    parity       greedy tokens that are not stock's under policies whose budgets keep everything, with async scheduling
                 and captured graphs, the model compiled by torch.compile and not. In float32 none may differ; what
                 differs in bfloat16 is told with the margin between stock's two best log-probabilities
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from benchmarks import report
from benchmarks.engine import GRAPHS, Outcome, apart, decode_ms, engine, scheduler, side_by_side
from benchmarks.gpu_smoke import COMMON as SMALL
from benchmarks.gpu_smoke import WHOLE, Generated, PromptSets, compare, generate, prompt_sets, with_gate
from benchmarks.held_bytes import most_running
from benchmarks.parity import GRAPHS as SMALL_GRAPHS
from vllm_kvplug.tiny import head_profile

KEEP20 = {"kv_policy": "synthetic", "kv_policy_config": {"ratio": 0.2}}
KEEP100 = {"kv_policy": "synthetic", "kv_policy_config": {"ratio": 1.0, "full_heads": 1.0}}
ENGINES: dict[str, dict[str, Any]] = {
    "stock.bf16": {},
    "stock.fp8": {"kv_cache_dtype": "fp8"},
    "keep20.bf16": KEEP20,
    "keep20.fp8": KEEP20 | {"kv_cache_dtype": "fp8"},
}
KEEP_ALL = [*WHOLE, ("fastkvzip", {"ratio": 1.0})]
"""Policies of `parity`: a ring, a cut at the prompt's end, and one that reads hidden states in the compiled model."""
COMPILED: dict[str, dict[str, Any]] = {
    "none": {},
    "vllm_compile": {"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE"},
}
"""What torch.compile has to do with the model: nothing, or what it does by vLLM's default."""
OUTPUT_TOKENS = 65
CHUNK = 16_384
COMMON: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
    "max_num_batched_tokens": CHUNK,
    "max_num_seqs": 32,
    "gpu_memory_utilization": 0.9,
    "disable_log_stats": False,
    **GRAPHS,
}
Found = tuple[dict[str, float], list[dict[str, Any]]]
"""Metrics and rows."""


def prompts(tokens: int, count: int) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": [(7 * i + 13 * j) % 250 + 5 for i in range(tokens)]} for j in range(count)]


def run(llm: Any, tokens: int, count: int, outputs: int = OUTPUT_TOKENS) -> list[Any]:
    """vLLM's times of `count` requests at once."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True, detokenize=False)
    return [output.metrics for output in llm.generate(prompts(tokens, count), params, use_tqdm=False)]


def times(llm: Any, tokens: int, count: int) -> tuple[float, float]:
    """Seconds until the last prompt was done, and milliseconds per output token from then on."""
    stats = run(llm, tokens, count)
    prefill = max(s.first_token_ts for s in stats) - min(s.scheduled_ts for s in stats)
    return prefill, decode_ms(stats, OUTPUT_TOKENS)


def shape(text: str) -> tuple[int, int]:
    tokens, count = text.split("x")
    return int(tokens), int(count)


def metric(name: str, text: str) -> str:
    """As `decode.131072x1.keep20.bf16` and `stock.131072x1.bf16`."""
    kind, pages = name.split(".")
    return f"stock.{text}.{pages}" if kind == "stock" else f"decode.{text}.{kind}.{pages}"


def decode(model: str, common: dict[str, Any], name: str, shapes: list[str]) -> Found:
    metrics: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    longest = max(shape(s)[0] for s in shapes) + OUTPUT_TOKENS
    with engine(model, **common, max_model_len=longest, **ENGINES[name]) as llm:
        run(llm, min(1000, longest - OUTPUT_TOKENS), 1)  # compiles what is left to compile
        for text in shapes:
            prefill, tpot = times(llm, *shape(text))
            key = metric(name, text)
            metrics |= {f"{key}.tpot_ms": round(tpot, 3), f"{key}.prefill_s": round(prefill, 4)}
            rows.append({"case": "decode", "engine": name, "shape": text, "tpot_ms": tpot, "prefill_s": prefill})
            print(rows[-1], flush=True)
    return metrics, rows


def tax(model: str, common: dict[str, Any], lengths: list[int], repeats: int) -> Found:
    """Medians of single requests, of which stock's and the policy's alternate."""
    metrics: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    shared = common | {"max_model_len": max(lengths) + OUTPUT_TOKENS, "gpu_memory_utilization": 0.4}
    with engine(model, **shared) as stock, engine(model, **shared, **KEEP100) as ours:
        for tokens in lengths:
            found: dict[str, list[tuple[float, float]]] = {"stock": [], "keep100": []}
            for i in range(repeats + 2):
                for name, llm in (("stock", stock), ("keep100", ours)):
                    once = times(llm, tokens, 1)
                    if i >= 2:
                        found[name].append(once)
            (ttft, tpot), (ttft_ours, tpot_ours) = (
                [median(column) for column in zip(*one, strict=True)] for one in found.values()
            )
            metrics |= {f"tax.{tokens}.ttft_ratio": ttft_ours / ttft, f"tax.{tokens}.tpot_ratio": tpot_ours / tpot}
            rows.append({"case": "tax", "tokens": tokens, "ttft_s_and_tpot_ms": found})
            print(tokens, ttft, ttft_ours, tpot, tpot_ours, flush=True)
    return metrics, rows


def concurrency(model: str, common: dict[str, Any], name: str, longest: int) -> Found:
    """Reported by vLLM for requests of `longest` tokens, and really decoding together at a quarter of it all."""
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the scheduler is looked at
    given = common | ENGINES[name]
    with engine(model, **given | {"max_model_len": longest}) as llm:
        config = scheduler(llm).kv_cache_config
        reported = get_max_concurrency_for_kv_cache_config(llm.llm_engine.vllm_config, config)
        blocks = config.num_blocks
    short = longest // 4
    with engine(model, **given | {"max_model_len": short, "num_gpu_blocks_override": blocks // 4}) as llm:
        asked = [p["prompt_token_ids"] for p in prompts(short - 600, int(reported * 1.2) + 2)]
        running = most_running(llm, asked, 512)
    row = {"case": "concurrency", "engine": name, "tokens": longest, "reported": reported, "blocks": blocks}
    row |= {"decoding_together": running, "gpu_bytes": gpu_bytes()}
    print(row, flush=True)
    return {}, [row]


def saturated(model: str, common: dict[str, Any], name: str, tokens: int, count: int, outputs: int) -> Found:
    with engine(model, **common, max_model_len=tokens + outputs, **ENGINES[name]) as llm:
        prompt_s, _ = times(llm, tokens, 1)
        stats = run(llm, tokens, count, outputs)
    whole = max(s.last_token_ts for s in stats) - min(s.scheduled_ts for s in stats)
    speed = count * outputs / (whole - count * prompt_s)
    row = {"case": "saturated", "engine": name, "shape": f"{count}x{tokens}", "tok_s": speed}
    row |= {"end_to_end_s": whole, "one_prompt_s": prompt_s}
    print(row, flush=True)
    return {}, [row]


def made_up_profile(model: Path, folder: Path) -> Path:
    """Every layer's first head is a pivot; the others' roles are as common as in the authors' file for Llama."""
    from transformers import AutoConfig

    config, draw = AutoConfig.from_pretrained(model), random.Random(0)
    layers = config.num_hidden_layers
    heads = range(config.num_key_value_heads - 1)
    drawn = [draw.choices(["volatile", "anchor", "satellite"], [17, 10, 196], k=len(heads)) for _ in range(layers)]
    roles = [["pivot", *others] for others in drawn]
    raw = [[draw.uniform(0.6, 2.0) if role in ("anchor", "satellite") else -1.0 for role in row] for row in roles]
    mean = fmean(weight for row in raw for weight in row if weight > 0)
    weights = [[weight / mean if weight > 0 else weight for weight in row] for row in raw]
    return head_profile(model, folder / "profile.json", roles, weights)


def always_drift(worker: Any) -> None:
    """No overlap is below 1, which is all that random weights have: they attend to everything alike."""
    drift = worker.runtime.retriever.drift
    drift.retrieval = replace(drift.retrieval, threshold=2.0)


def tail(model: str, common: dict[str, Any], tokens: int, outputs: int) -> Found:
    """A check that finds drift every 40 tokens: fetches land 36 steps after one, and 4 later comes the next."""
    from vllm import SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # a function goes to the worker
        knobs = {"rho": 0.5, "land_after": 36, "host_gib": 16}
        knobs["profile"] = str(made_up_profile(Path(model), Path(folder)))
        policy = {"kv_policy": "heterocache", "kv_policy_config": knobs}
        with engine(model, **common, max_model_len=tokens + outputs, **policy) as llm:
            llm.collective_rpc(always_drift)
            run(llm, min(1000, tokens), 1)
            params = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True, detokenize=False)
            llm.llm_engine.add_request("tail", prompts(tokens, 1)[0], params)
            arrived = []
            while llm.llm_engine.has_unfinished_requests():
                if llm.llm_engine.step():
                    arrived.append(time.perf_counter())
            counted = {m.name: m.value for m in llm.get_metrics() if m.name.startswith("vllm:kvplug_")}
    gaps = [1000 * (after - before) for before, after in zip(arrived[1:], arrived[2:], strict=False)]
    p99 = quantiles(gaps, n=100)[98]
    row = {"case": "tail", "tokens": tokens, "gaps_ms": [round(gap, 3) for gap in gaps], "counted": counted}
    row |= {"median_ms": median(gaps), "p99_ms": p99}
    print({key: value for key, value in row.items() if key != "gaps_ms"}, sorted(gaps)[-20:], flush=True)
    return {f"tail.{tokens}.p99_over_median": p99 / median(gaps), f"tail.{tokens}.median_ms": median(gaps)}, [row]


def greedy_tokens(model: str, given: dict[str, Any], sets: PromptSets) -> Generated:
    with engine(model, **given) as llm:
        return generate(llm, sets)


def parity(model: str, tasks: Path, at_once: int, seconds: float) -> Found:
    """Against stock of the same dtype, compiled alike. An engine that fails, or has not ended after `seconds`, is a row
    with an error, and not counted.
    """
    sets = prompt_sets(model, tasks)
    jobs = {}
    for dtype, compiled, policy in product(("float32", "bfloat16"), COMPILED, [None, *KEEP_ALL]):
        graphs = {"compilation_config": SMALL_GRAPHS | COMPILED[compiled]}
        given = SMALL | graphs | {"dtype": dtype, "async_scheduling": True}
        if policy:
            given |= {"kv_policy": policy[0], "kv_policy_config": with_gate(model, *policy)}
        jobs[dtype, compiled, policy[0] if policy else "stock"] = partial(greedy_tokens, model, given, sets)
    names = list(jobs)
    outcomes = {name: Outcome[Generated](None, "it did not end in time") for name in names}
    for number, outcome in side_by_side(list(jobs.values()), at_once, seconds):
        outcomes[names[number]] = outcome
        print(names[number], outcome.error or "is done", flush=True)
    rows: list[dict[str, Any]] = []
    for dtype, compiled, name in names:
        mine, stock = outcomes[dtype, compiled, name], outcomes[dtype, compiled, "stock"]
        row = {"case": "parity", "dtype": dtype, "compiled": compiled, "engine": name}
        if error := mine.error or stock.error:
            rows.append(row | {"error": error[-600:]})
        elif name != "stock":
            tokens = sum(len(answer) for answers in mine.value.values() for answer, _ in answers)
            rows.append(row | {"tokens": tokens} | compare(mine.value, stock.value))
    return parity_metrics(rows), rows


def parity_metrics(rows: list[dict[str, Any]]) -> dict[str, float]:
    """`parity` is of float32. largest_margin: how far apart stock's two best were at most where tokens part."""
    metrics: dict[str, float] = {}
    for name, dtype in (("parity", "float32"), ("parity.bfloat16", "bfloat16")):
        done = [row for row in rows if row["dtype"] == dtype and "error" not in row]
        if not done:  # no token that differs would be no finding
            continue
        wrong = [n for row in done for key, n in row.items() if key.endswith(": mismatched tokens")]
        margins = [m for row in done for key, found in row.items() if key.endswith(": margins") for m in found]
        metrics |= {f"{name}.engines": len(done), f"{name}.tokens": sum(row["tokens"] for row in done)}
        metrics |= {f"{name}.mismatched_tokens": sum(wrong), f"{name}.largest_margin": max(margins, default=0.0)}
    return metrics


def gpu_bytes() -> int | None:
    """What nvidia-smi counts as used on the whole GPU; None without one."""
    import torch

    if torch.version.cuda is None:
        return None
    free, total = torch.cuda.mem_get_info()
    return total - free


def ratios(rows: list[dict[str, Any]], saturated_shape: str, longest: int) -> dict[str, float]:
    """Metrics that compare engines."""
    by_case = {(row["case"], row["engine"]): row for row in rows if row.get("case") in ("concurrency", "saturated")}
    metrics: dict[str, float] = {}
    for (case, name), row in by_case.items():
        kind, pages = name.split(".")
        stock = {p: by_case.get((case, f"stock.{p}")) for p in ("bf16", "fp8")}
        if kind == "stock":
            continue
        if case == "concurrency" and (other := stock[pages]):
            key = f"concurrency.{longest}.{kind}.{pages}_ratio"
            metrics[key] = row["reported"] / other["reported"]
            metrics[f"{key}_decoding"] = row["decoding_together"] / other["decoding_together"]
        if case == "saturated":
            metrics |= {
                f"saturated.{saturated_shape}.{kind}.{pages}.tok_s_vs_stock_{p}": row["tok_s"] / other["tok_s"]
                for p, other in stock.items()
                if other
            }
    return metrics


def jobs(args: argparse.Namespace, common: dict[str, Any]) -> Iterator[partial[Found]]:
    for case in args.cases:
        if case == "tax":
            yield partial(tax, args.model, common, args.tax, args.repeats)
        if case == "tail":
            yield partial(tail, args.model, common, args.longest, 401)
        if case == "parity":
            yield partial(parity, args.model, args.tasks, args.at_once, args.seconds)
        for name in args.engines if case in ("decode", "concurrency", "saturated") else []:
            if case == "decode":
                yield partial(decode, args.model, common, name, args.shapes)
            if case == "concurrency":
                yield partial(concurrency, args.model, common, name, args.longest)
            if case == "saturated":
                count, tokens = shape(args.saturated)
                yield partial(saturated, args.model, common, name, tokens, count, args.outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", default=["decode", "tax", "concurrency", "saturated", "tail"])
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--shapes", nargs="+", default=["131072x1", "32768x8", "220000x1"], help="TOKENSxREQUESTS")
    parser.add_argument("--tax", type=int, nargs="+", default=[1000, 16_384], metavar="TOKENS")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--longest", type=int, default=131_072, metavar="TOKENS")
    parser.add_argument("--saturated", default="32x65536", metavar="REQUESTSxTOKENS")
    parser.add_argument("--outputs", type=int, default=512, metavar="TOKENS")
    parser.add_argument("--tasks", type=Path, help="a task file, for parity")
    parser.add_argument("--at-once", type=int, default=8, metavar="ENGINES", help="side by side, in parity")
    parser.add_argument("--seconds", type=float, default=300, help="of parity in all")
    args = parser.parse_args()
    if "parity" in args.cases and args.tasks is None:
        parser.error("the case parity needs --tasks")
    metrics: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    for job in jobs(args, COMMON | {"dtype": args.dtype}):
        try:
            found, more = apart(job)
            metrics |= found
            rows += more
        except Exception:  # one engine that fails must not hide the others
            rows.append({"job": job.func.__name__, "error": traceback.format_exc()[-600:]})
            print(rows[-1], flush=True)
        report.write(args.out, report.result("gpu_engine", metrics | ratios(rows, args.saturated, args.longest), rows))


if __name__ == "__main__":
    main()
