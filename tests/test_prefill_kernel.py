"""Attention of prompt chunks, our kernel's and FlashAttention's, against plain torch: stored pages, rings, poison."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from kernel_tools import DEVICE, INTERPRETED, run_interpreted, runs_kernel, starts_interpreter
from slow_flash import slow_flash

from vllm_kvplug.placement.pool import PagePool
from vllm_kvplug.placement.tables import PageTables, TableSizes
from vllm_kvplug.worker.flash import FlashPlan, flash_attention
from vllm_kvplug.worker.step import PrefillRow

NAN = float("nan")
UNBOUNDED = 1 << 30
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    """rows: tokens before the chunk and in it, of every request. ring: (sinks, window). cut: head n of a layer has
    lost the last n * cut of its tokens before the chunk.
    """

    name: str
    rows: tuple[tuple[int, int], ...]
    heads: int = 2
    group: int = 3
    dim: int = 32
    ring: tuple[int, int] | None = None
    cut: int = 0


CASES = [
    Case("first-chunk", ((0, 70),)),
    Case("one-token", ((0, 1), (5, 1))),
    Case("several-rows", ((0, 5), (33, 64), (100, 129), (17, 2)), heads=3, group=1, dim=64),
    Case("across-a-table-chunk", ((1050, 20),), group=2),
    Case("wide", ((40, 30),), heads=1, group=2, dim=128),
    Case("ring", ((0, 90), (20, 50), (200, 70), (31, 3)), ring=(4, 28)),
    Case("heads-of-unlike-length", ((0, 9), (50, 70), (33, 1), (1100, 40)), heads=3, group=2, cut=16),
    Case("ring-without-sinks", ((100, 40),), ring=(0, 16)),
]


FP8 = torch.float8_e4m3fn


class Batch:
    """Requests whose earlier tokens lie on pages of a second layer's heads; all that nobody may read is NaN."""

    def __init__(self, case: Case, dtype: torch.dtype):
        generator = torch.Generator().manual_seed(0)
        self.case, self.scale = case, case.dim**-0.5
        self.first_head = case.heads
        limit = UNBOUNDED if case.ring is None else sum(case.ring)
        sinks = case.ring[0] if case.ring else 0
        blocks = [-(-(before + tokens) // 16) for before, tokens in case.rows]
        sizes = TableSizes(len(case.rows), 2 * case.heads, 2048, sum(blocks) + 1)
        self.tables = PageTables(sizes, DEVICE)
        pages = torch.full(((sum(blocks) + 1) * 2 * case.heads, 16, 2 * case.dim), NAN, dtype=dtype, device=DEVICE)
        self.pool = PagePool(pages)
        self.kv, ids = [], (torch.randperm(sum(blocks), generator=generator) + 1).tolist()
        for slot, (before, tokens) in enumerate(case.rows):
            kv = torch.randn(before + tokens, case.heads, 2 * case.dim, generator=generator).to(DEVICE, dtype)
            self.kv.append(kv)
            row = torch.tensor([[ids.pop() for _ in range(blocks[slot])]], dtype=torch.int32, device=DEVICE)
            if before:
                where = self.tables.extend(slot, row, 0, before, sinks, limit)[:, self.first_head :]
                live = where >= 0
                self.pool.put(where[live], kv[:before][live])
            self.tables.extend(slot, row, before, before + tokens, sinks, limit)  # the chunk itself is not written yet
            if before:
                self.tables.lengths[slot, self.first_head :] -= case.cut * torch.arange(case.heads, device=DEVICE)
        total = sum(tokens for _, tokens in case.rows) + 3  # other rows of the batch come first
        self.query, self.key, self.value = (
            torch.full((total, n, case.dim), NAN, dtype=dtype, device=DEVICE)
            for n in (case.heads * case.group, case.heads, case.heads)
        )
        self.plan_rows, at = [], 3
        for slot, (before, tokens) in enumerate(case.rows):
            self.query[at : at + tokens] = torch.randn(
                tokens, case.heads * case.group, case.dim, generator=generator
            ).to(DEVICE, dtype)
            self.key[at : at + tokens], self.value[at : at + tokens] = self.kv[slot][before:].chunk(2, -1)
            self.plan_rows.append((slot, at, tokens, before, min(before, limit)))
            at += tokens
        self.out = torch.full_like(self.query, NAN)

    def store_in_e4m3(self) -> None:
        """What is stored, not the chunks."""
        self.pool = PagePool(self.pool.pages.to(FP8), self.pool.dtype)
        for slot, _, _, before, _ in self.plan_rows:
            self.kv[slot][:before] = self.kv[slot][:before].to(FP8).to(self.kv[slot].dtype)

    def run(self) -> torch.Tensor:
        from vllm_kvplug.kernels.prefill_attention import PrefillPlan, prefill_attention

        plan = PrefillPlan(self.plan_rows, torch.device(DEVICE))
        prefill_attention(
            self.out,
            self.query,
            self.key,
            self.value,
            self.pool.pages,
            self.tables.directory,
            self.tables.chunks,
            self.tables.lengths,
            plan,
            self.first_head,
            self.scale,
            self.case.ring,
        )
        return self.out

    def run_flash(self) -> torch.Tensor:
        rows = [
            PrefillRow("", slot, slice(at, at + tokens), before, before + tokens, 0, False)
            for slot, at, tokens, before, _ in self.plan_rows
        ]
        plan = FlashPlan.of(rows, self.case.heads, torch.device(DEVICE))
        new = self.out, self.query, self.key, self.value
        flash_attention(*new, self.pool.pages, self.tables, plan, self.first_head, self.scale)
        return self.out

    def reference(self) -> torch.Tensor:
        """Every query over the whole history of its request, with a mask."""
        expected = torch.full(self.query.shape, NAN)
        for slot, at, tokens, before, _ in self.plan_rows:
            keys, values = self.kv[slot].float().cpu().chunk(2, -1)
            position = torch.arange(before + tokens)
            distance = position[before:, None] - position
            seen = distance >= 0
            if self.case.ring:
                sinks, window = self.case.ring
                seen &= (position < sinks) | (distance < window)
            for head in range(self.query.shape[1]):
                lost = head // self.case.group * self.case.cut if before else 0
                there = seen & ~((position >= before - lost) & (position < before))
                k, v = keys[:, head // self.case.group], values[:, head // self.case.group]
                scores = self.query[at : at + tokens, head].float().cpu() @ k.T * self.scale
                expected[at : at + tokens, head] = scores.masked_fill(~there, -torch.inf).softmax(-1) @ v
        return expected


@runs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_prefill_attention(case: Case, dtype: torch.dtype) -> None:
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter computes with numpy, which has no bfloat16")
    batch = Batch(case, dtype)
    actual = batch.run().float().cpu()
    torch.testing.assert_close(actual, batch.reference(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], equal_nan=True)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """The dtype to test with; without a GPU, something slow takes the library's place."""
    if DEVICE != "cpu":
        return torch.bfloat16
    from vllm.v1.attention.ops import merge_attn_states as merging

    monkeypatch.setattr("vllm_kvplug.worker.flash._attend", slow_flash)

    def merge(out, *parts):
        assert all(part.is_contiguous() for part in parts), "vLLM's kernel asks for it"
        merging._merge_attn_states_torch(out, *parts)

    monkeypatch.setattr(merging, "merge_attn_states", merge)
    return torch.float32


@pytest.mark.skipif(INTERPRETED, reason="is no kernel of ours")
@pytest.mark.parametrize("case", [c for c in CASES if not c.ring], ids=lambda case: case.name)
def test_through_flash_attention(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU with the library itself; here, what is asked of it."""
    dtype = stand_in(monkeypatch)
    batch = Batch(case, dtype)
    actual = batch.run_flash().float().cpu()
    torch.testing.assert_close(actual, batch.reference(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], equal_nan=True)


@pytest.mark.skipif(INTERPRETED, reason="is no kernel of ours")
@pytest.mark.parametrize("case", [c for c in CASES if not c.ring], ids=lambda case: case.name)
def test_through_flash_attention_over_e4m3(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library wants queries in e4m3 as well, three bits of mantissa; on a GPU it also rounds weights."""
    dtype = stand_in(monkeypatch)
    batch = Batch(case, dtype)
    batch.store_in_e4m3()
    actual, expected = batch.run_flash().float().cpu(), batch.reference()
    there = ~expected.isnan()
    assert torch.equal(actual.isnan(), ~there)
    error = (actual - expected)[there].norm() / expected[there].norm()
    assert error < 0.06


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter computes with numpy, which has no e4m3")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_prefill_attention_over_e4m3(case: Case) -> None:
    batch = Batch(case, torch.bfloat16)
    batch.store_in_e4m3()
    tolerance = TOLERANCE[torch.bfloat16]
    torch.testing.assert_close(
        batch.run().float().cpu(), batch.reference(), rtol=tolerance, atol=tolerance, equal_nan=True
    )


@starts_interpreter
def test_interpreted() -> None:
    run_interpreted(__file__)
