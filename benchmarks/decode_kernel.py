"""Bandwidth of decode attention over ragged head pages on one GPU, beside FlashInfer and FlashAttention 3.

    python -m benchmarks.decode_kernel --out FILE [--repeats 20] [--kernels ours ...] [--cases mixed_64x8 ...]

One layer, 8 KV heads, 4 query heads each, head size 128, bf16 (and e4m3 for ours), pages of 16 tokens in random order.
Heads are folded into the batch for the libraries, which know no heads of unlike length. Bytes are those of K and V;
caches are rotated so that none is found in L2. Kernels are timed in CUDA graphs. Our plan, which is made once per step
for all layers, is timed apart. `ours_behind_write` is what a layer of a model launches: the new tokens are written, and
attention begins to look up its pages meanwhile; its time is that of both.
"""

from __future__ import annotations

import argparse
import random
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from vllm_kvplug.kernels.decode_attention import DecodePlan
from vllm_kvplug.kernels.hopper import HopperPlan

from benchmarks import report
from vllm_kvplug import ops

HEADS, GROUP, DIM, PAGE, CHUNK = 8, 4, 128, 16, 64
SCALE = DIM**-0.5
COLD_BYTES = 1 << 29  # of rotated caches: ten times the L2 of an H200
WARM_SECONDS = 0.2  # of work before a measurement: making a cache leaves the GPU idle, and its clocks fall


@dataclass(frozen=True)
class Case:
    """lengths: tokens of every KV head of every request."""

    name: str
    lengths: list[list[int]]

    @property
    def bytes(self) -> int:
        return sum(map(sum, self.lengths)) * 2 * DIM * 2


def cases() -> list[Case]:
    draw = random.Random(0)
    mixed = [[draw.randint(512, 32_768) for _ in range(HEADS)] for _ in range(64)]
    return [
        Case("even_8x131072", [[131_072] * HEADS]),
        Case("ragged_1x131072_7x6553", [[131_072] + [6_553] * (HEADS - 1)]),
        Case("mixed_64x8", mixed),
        Case("short_64x8x1024", [[1_024] * HEADS] * 64),
    ]


class Cache:
    """Pages of a case in random order, with the tables of our kernel and of the libraries."""

    def __init__(self, case: Case, seed: int):
        generator = torch.Generator().manual_seed(seed)
        counts = [[-(-n // PAGE) for n in row] for row in case.lengths]
        total = sum(map(sum, counts))
        self.pool = torch.randn(total, PAGE, 2 * DIM, device="cuda", dtype=torch.bfloat16)
        ids = torch.randperm(total, generator=generator).int()
        chunks_per_head = -(-max(map(max, counts)) // CHUNK)
        rows = len(counts)
        directory = torch.zeros(rows, HEADS, chunks_per_head, dtype=torch.int32)
        chunks, flat, at = [], [], 0
        for r, row in enumerate(counts):
            for h, count in enumerate(row):
                mine = ids[at : at + count]
                at += count
                flat.append(mine)
                padded = torch.zeros(-(-count // CHUNK) * CHUNK, dtype=torch.int32)
                padded[:count] = mine
                directory[r, h, : len(padded) // CHUNK] = torch.arange(len(chunks), len(chunks) + len(padded) // CHUNK)
                chunks += padded.view(-1, CHUNK).unbind()
        self.directory, self.chunks = directory.cuda(), torch.stack(chunks).cuda()
        self.lengths = torch.tensor(case.lengths, dtype=torch.int32, device="cuda")
        self.pages_of_head = flat
        self.query = torch.randn(rows, HEADS * GROUP, DIM, device="cuda", dtype=torch.bfloat16)
        self.row_slot = torch.arange(rows, dtype=torch.int32, device="cuda")

    def keys_and_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As the libraries take them: [pages, 16, 1, D], each contiguous."""
        key, value = self.pool.unsqueeze(2).chunk(2, -1)
        return key.contiguous(), value.contiguous()


Attend = Callable[[], torch.Tensor]


Plan = type[DecodePlan] | type[HopperPlan]


def planned(cache: Cache, plan_type: Plan) -> Attend:
    plan = plan_type(len(cache.row_slot), 1, HEADS, HEADS * GROUP, DIM, cache.query.device)
    plan.update(cache.row_slot, cache.lengths)
    out = torch.empty_like(cache.query)

    def run() -> torch.Tensor:
        tables = (cache.directory, cache.chunks, cache.row_slot, cache.lengths)
        plan.attend(out, cache.query, cache.pool, *tables, 0, SCALE)
        return out

    return run


def ours(cache: Cache) -> Attend:
    return planned(cache, HopperPlan)


def ours_behind_write(cache: Cache) -> Attend:
    """Writes over the last token of every head, as it is."""
    attend = ours(cache)
    ends = [pages[-1] * PAGE for pages in cache.pages_of_head]
    offsets = (cache.lengths.flatten() - 1) % PAGE
    last = (torch.stack(ends).to(cache.lengths.device) + offsets).view(-1, HEADS).long()
    key, value = cache.pool.view(-1, 2 * DIM)[last].chunk(2, -1)

    def run() -> torch.Tensor:
        ops.kv_write(cache.pool, key, value, last)
        return attend()

    return run


def ours_e4m3(cache: Cache) -> Attend:
    plan = HopperPlan(len(cache.row_slot), 1, HEADS, HEADS * GROUP, DIM, cache.query.device)
    plan.update(cache.row_slot, cache.lengths)
    out, pool = torch.empty_like(cache.query), cache.pool.to(torch.float8_e4m3fn)
    scales = torch.ones(2, HEADS, device=pool.device)

    def run() -> torch.Tensor:
        tables = (cache.directory, cache.chunks, cache.row_slot, cache.lengths)
        plan.attend(out, cache.query, pool, *tables, 0, SCALE, scales)
        return out

    return run


def ours_in_triton(cache: Cache) -> Attend:
    return planned(cache, DecodePlan)


def flashinfer(cache: Cache) -> Attend:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    key, value = cache.keys_and_values()
    counts = torch.tensor([len(pages) for pages in cache.pages_of_head])
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int().cuda()
    last = ((cache.lengths.flatten() - 1) % PAGE + 1).int()
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    indices = torch.cat(cache.pages_of_head).cuda()
    wrapper.plan(indptr, indices, last, GROUP, 1, DIM, PAGE, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
    query = cache.query.view(-1, GROUP, DIM)

    def run() -> torch.Tensor:
        return wrapper.run(query, (key, value)).view_as(cache.query)

    return run


def flash_attention_3(cache: Cache) -> Attend:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    key, value = cache.keys_and_values()
    longest = max(len(pages) for pages in cache.pages_of_head)
    table = torch.zeros(len(cache.pages_of_head), longest, dtype=torch.int32)
    for row, pages in enumerate(cache.pages_of_head):
        table[row, : len(pages)] = pages
    table, used = table.cuda(), cache.lengths.flatten()
    query = cache.query.view(-1, GROUP, DIM)
    starts = torch.arange(len(used) + 1, dtype=torch.int32, device="cuda")

    def run() -> torch.Tensor:
        return flash_attn_varlen_func(
            q=query,
            k=key,
            v=value,
            max_seqlen_q=1,
            cu_seqlens_q=starts,
            max_seqlen_k=longest * PAGE,
            seqused_k=used,
            block_table=table,
            softmax_scale=SCALE,
            causal=False,
            fa_version=3,
        ).view_as(cache.query)

    return run


KERNELS: dict[str, Callable[[Cache], Attend]] = {
    "ours": ours,
    "ours_behind_write": ours_behind_write,
    "ours_e4m3": ours_e4m3,
    "ours_in_triton": ours_in_triton,
    "flashinfer": flashinfer,
    "flash_attention_3": flash_attention_3,
}


def microseconds(runs: list[Attend], repeats: int) -> float:
    """Median time of one run; all are launched one after another from one graph, once clocks have risen."""
    for run in runs:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    warm = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < warm:
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * begin.elapsed_time(end) / len(runs))
    return median(times)


def copy_bandwidth() -> float:
    """TB/s of a copy by a kernel, reads and writes counted."""
    source = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)

    def run() -> torch.Tensor:
        return torch.neg(source, out=target)  # what only copies becomes a copy engine's work, which is slower

    return 2 * source.nbytes / microseconds([run] * 4, 10) / 1e6


def measure(case: Case, kernels: list[str], repeats: int) -> list[dict[str, Any]]:
    copies = max(1, min(8, -(-COLD_BYTES // case.bytes)))
    caches = [Cache(case, seed) for seed in range(copies)]
    expected = ours(caches[0])().float()
    rows = []
    for name in kernels:
        row: dict[str, Any] = {"case": case.name, "kernel": name, "bytes": case.bytes}
        try:
            runs = [KERNELS[name](cache) for cache in caches]
            row["error_against_ours"] = float((runs[0]().float() - expected).abs().max())
            row["us"] = round(microseconds(runs * (2 if copies > 1 else 4), repeats), 2)
            row["bytes"] //= 2 if name == "ours_e4m3" else 1
            row["tb_s"] = round(row["bytes"] / row["us"] / 1e6, 3)
        except Exception:  # a library that cannot do a case must not hide the others
            row["error"] = traceback.format_exc()[-400:]
        rows.append(row)
        print(row, flush=True)
    rows.append({"case": case.name, "kernel": "our plan, 32 layers", "us": round(plan_microseconds(case, repeats), 2)})
    print(rows[-1], flush=True)
    return rows


def plan_microseconds(case: Case, repeats: int) -> float:
    layers, rows = 32, len(case.lengths)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device="cuda").repeat(1, layers)
    slots = torch.arange(rows, dtype=torch.int32, device="cuda")
    plan = HopperPlan(rows, layers, HEADS, HEADS * GROUP, DIM, lengths.device)

    def run() -> torch.Tensor:
        plan.update(slots, lengths)
        return plan.parts

    return microseconds([run] * 4, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in cases()])
    args = parser.parse_args()
    bandwidth = copy_bandwidth()
    metrics, rows = {"kernel.copy.tb_s": bandwidth}, []
    for case in cases():
        if args.cases and case.name not in args.cases:
            continue
        rows += measure(case, args.kernels, args.repeats)
        done = [row for row in rows if "tb_s" in row]
        metrics |= {f"kernel.{r['case']}.tb_s": r["tb_s"] for r in done if r["kernel"] == "ours"}
        metrics |= {f"kernel.fp8_{r['case']}.tb_s": r["tb_s"] for r in done if r["kernel"] == "ours_e4m3"}
        report.write(args.out, report.result("decode_kernel", metrics, rows))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
