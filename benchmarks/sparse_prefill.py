"""Attention of a long prompt behind a gate on admission, on one GPU, beside FlashAttention 3 over the whole of it.

    python -m benchmarks.sparse_prefill --out FILE [--tokens 131072] [--chunks 8192 16384] [--admitted 0.2]

One layer of Llama-3.1-8B: 8 KV heads, 4 query heads each, head size 128, bf16, window 256. Heads admit unlike shares,
which differ fourfold and have the given mean. The prompt comes in chunks, as from a scheduler; every chunk is timed by
itself, over pages of what the ones before it left. Seconds are sums over chunks, times 32 layers. `bound` is the time
of the attended pairs at the rate that FlashAttention 3 reaches on the dense prompt. `gate` is what the write gate (512
hidden units) takes on the same chunks, as one kernel and as torch's products, and `gate_decode` on 16 decoded tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import report
from vllm_kvplug import ops
from vllm_kvplug.gates.write_gate import WriteGate
from vllm_kvplug.memory import Geometry
from vllm_kvplug.placement.tables import PageTables, TableSizes
from vllm_kvplug.plan import ceil_div
from vllm_kvplug.policies.base import LocalWindow
from vllm_kvplug.rotary import Rotary
from vllm_kvplug.shape import PAGE, ModelShape
from vllm_kvplug.worker.sparse import SparsePlan, sparse_attention
from vllm_kvplug.worker.step import PrefillRow

LAYERS, HEADS, GROUP, DIM, WINDOW, HIDDEN = 32, 8, 4, 128, 256, 512
SCALE = DIM**-0.5
TAU = 0.5
UNBOUNDED = 1 << 30
SAMPLED = 16  # queries of the last chunk that are compared with float32


class Prompt:
    """Q, K and V of one layer, and which head admits which token."""

    def __init__(self, tokens: int, share: float):
        generator = torch.Generator("cuda").manual_seed(0)

        def draw(heads: int) -> torch.Tensor:
            return torch.randn(tokens, heads, DIM, generator=generator, device="cuda", dtype=torch.bfloat16)

        self.tokens, self.query, self.key, self.value = tokens, draw(HEADS * GROUP), draw(HEADS), draw(HEADS)
        shares = torch.linspace(0.4, 1.6, HEADS, device="cuda") * share
        self.admitted = torch.rand(tokens, HEADS, generator=generator, device="cuda") < shares

    def pairs(self, dense: bool) -> float:
        """Query-key pairs of all query heads; behind the gate, those of the window and those admitted beyond it."""
        n, w = self.tokens, WINDOW
        if dense:
            return n * (n + 1) / 2 * HEADS * GROUP
        near = n * w - w * (w - 1) / 2
        left = torch.arange(n, 0, -1, device="cuda") - w  # queries that see a token from beyond the window
        beyond = (self.admitted * left.clamp_min(0)[:, None]).sum().item()
        return (near * HEADS + beyond) * GROUP


class Gated:
    """Chunks behind a gate, over pages in random blocks that hold what chunks before would have left."""

    def __init__(self, prompt: Prompt, through_flash: bool):
        self.prompt, self.through_flash, self.local = prompt, through_flash, LocalWindow(WINDOW, TAU)
        blocks = ceil_div(prompt.tokens, PAGE) + 2
        self.row = (torch.randperm(blocks, device="cuda") + 1).int()[None]
        self.sizes = TableSizes(1, HEADS, prompt.tokens + PAGE, blocks + 1, scored=True)
        self.pages = torch.zeros((blocks + 1) * HEADS, PAGE, 2 * DIM, device="cuda", dtype=torch.bfloat16)

    def begin(self, start: int, end: int) -> None:
        """What comes before [start, end), room for it, and its plan, which is made once for all layers."""
        self.tables = PageTables(self.sizes, "cuda")
        self._store(start)
        self.tables.extend(0, self.row, start, end, 0, UNBOUNDED)
        row = PrefillRow("", 0, slice(0, end - start), start, end, start, False)
        shape = ModelShape(LAYERS, HEADS, HEADS * GROUP, DIM)
        geometry = Geometry.of_rank(shape, 0, torch.bfloat16, 1, self.prompt.tokens)
        self.plan = SparsePlan.of([row], geometry, self.local, self.through_flash, torch.device("cuda"))

    def _store(self, before: int) -> None:
        prompt, tables = self.prompt, self.tables
        ring = torch.arange(max(before - WINDOW, 0), before, device="cuda")
        ring = ring[(ring % WINDOW).argsort()]
        lists = [torch.cat([ring, prompt.admitted[: before - len(ring), h].nonzero().flatten()]) for h in range(HEADS)]
        if before == 0:
            return
        where = tables.extend(0, self.row, 0, max(map(len, lists)), 0, UNBOUNDED)
        for head, order in enumerate(lists):
            place = where[: len(order), head]
            kv = torch.cat([prompt.key[order, head], prompt.value[order, head]], 1)
            self.pages.view(-1, 2 * DIM)[place] = kv
            tables.set_positions(place, order)
            tables.set_scores(place, prompt.admitted[order, head].float())
            tables.lengths[0, head] = len(order)

    def attend(self, start: int, end: int) -> torch.Tensor:
        prompt, new = self.prompt, slice(start, end)
        out = torch.empty_like(prompt.query[new])
        given = prompt.query[new], prompt.key[new], prompt.value[new], prompt.admitted[new]
        sparse_attention(out, *given, self.pages, self.tables, self.plan, 0, SCALE, self.local)
        return out


class Dense:
    """Chunks over the whole prompt as stock vLLM computes them: FlashAttention 3, pages of all heads."""

    def __init__(self, prompt: Prompt):
        self.prompt, blocks = prompt, prompt.tokens // PAGE
        self.table = torch.randperm(blocks, device="cuda").int()[None]
        self.pages = [torch.empty(blocks, PAGE, HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        for pages, new in zip(self.pages, (prompt.key, prompt.value), strict=True):
            pages[self.table[0].long()] = new.unflatten(0, (blocks, PAGE))

    def begin(self, start: int, end: int) -> None:
        self.starts = torch.tensor([0, end - start], dtype=torch.int32, device="cuda")
        self.used = torch.tensor([end], dtype=torch.int32, device="cuda")

    def attend(self, start: int, end: int) -> torch.Tensor:
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func(
            self.prompt.query[start:end],
            *self.pages,
            cu_seqlens_q=self.starts,
            max_seqlen_q=end - start,
            max_seqlen_k=end,
            seqused_k=self.used,
            block_table=self.table,
            softmax_scale=SCALE,
            causal=True,
            fa_version=3,
        )


class Scores:
    """The write gate on a prompt's chunks, of random weights."""

    def __init__(self, prompt: Prompt, fused: bool):
        self.key, self.fused = prompt.key, fused
        self.gate = WriteGate(1, HEADS, DIM, HIDDEN).requires_grad_(False).to("cuda", torch.bfloat16)
        self.rotary = Rotary(500_000.0 ** -torch.linspace(0, 1, DIM // 2, device="cuda"), 1.0)

    def begin(self, start: int, end: int) -> None:
        self.position = torch.arange(start, end, device="cuda")

    def attend(self, start: int, end: int) -> torch.Tensor:
        gate, key = self.gate, self.key[start:end]
        if not self.fused:
            rotated = key.transpose(0, 1)
            return gate.score(0, self.rotary.unrotate(rotated, self.position), rotated).T
        scores = torch.empty(key.shape[:2], device="cuda")
        weights = gate.w1[0], gate.b1[0], gate.w2[0], gate.b2[0]
        norms = gate.norm_pre[0], gate.norm_rope[0]
        ops.write_gate(scores, key, self.position, self.rotary.frequencies, norms, weights, 0)
        return scores


def expected(prompt: Prompt, position: torch.Tensor) -> torch.Tensor:
    """Attention of the queries at some positions behind the gate, in float32: [positions, query heads, D]."""
    before = torch.arange(prompt.tokens, device="cuda")
    age = position[:, None] - before
    heads = []
    for head in range(HEADS * GROUP):
        of = head // GROUP
        seen = (age >= 0) & ((age < WINDOW) | prompt.admitted[:, of])
        scores = prompt.query[position, head].float() @ prompt.key[:, of].float().T * SCALE
        heads.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ prompt.value[:, of].float())
    return torch.stack(heads, 1)


def milliseconds(attend: Callable[[int, int], torch.Tensor], start: int, end: int, repeats: int) -> float:
    attend(start, end)
    times = []
    for _ in range(repeats):
        begin, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        attend(start, end)
        done.record()
        done.synchronize()
        times.append(begin.elapsed_time(done))
    return median(times)


def measure(prompt: Prompt, chunk: int, repeats: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Seconds of all layers by way of computing, and times of every chunk."""
    ways: dict[str, Any] = {
        "sparse": Gated(prompt, True),
        "sparse_without_fa3": Gated(prompt, False),
        "dense": Dense(prompt),
        "gate": Scores(prompt, True),
        "gate_in_torch": Scores(prompt, False),
    }
    seconds, rows = dict.fromkeys(ways, 0.0), []
    for start in range(0, prompt.tokens, chunk):
        end = min(start + chunk, prompt.tokens)
        row: dict[str, Any] = {"chunk": chunk, "start": start}
        sample = torch.linspace(start, end - 1, SAMPLED, device="cuda").long()
        for name, way in ways.items():
            way.begin(start, end)
            row[f"{name}_ms"] = round(milliseconds(way.attend, start, end, repeats), 3)
            seconds[name] += row[f"{name}_ms"] * LAYERS / 1000
            if name.startswith("sparse"):
                error = way.attend(start, end)[sample - start].float() - expected(prompt, sample)
                row[f"{name}_error"] = float(error.abs().max())
        rows.append(row)
        print(row, flush=True)
    return seconds, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--chunks", type=int, nargs="+", default=[8_192, 16_384])
    parser.add_argument("--admitted", type=float, default=0.2)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    prompt = Prompt(args.tokens, args.admitted)
    share = prompt.pairs(dense=False) / prompt.pairs(dense=True)
    metrics, rows = {"sparse_prefill.admitted": prompt.admitted.float().mean().item()}, []
    for name, fused in (("gate_decode", True), ("gate_decode_in_torch", False)):
        scores = Scores(prompt, fused)
        scores.begin(0, 16)
        metrics[f"sparse_prefill.{name}_us"] = 1000 * milliseconds(scores.attend, 0, 16, 50)
    for chunk in args.chunks:
        seconds, more = measure(prompt, chunk, args.repeats)
        rows += more
        metrics |= {f"sparse_prefill.{chunk}.{name}_s": value for name, value in seconds.items()}
        metrics[f"sparse_prefill.{chunk}.bound_s"] = seconds["dense"] * share
        metrics[f"sparse_prefill.{chunk}.speedup"] = seconds["dense"] / seconds["sparse"]
        report.write(args.out, report.result("sparse_prefill", metrics, rows))


if __name__ == "__main__":
    main()
