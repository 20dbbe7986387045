"""Prompt chunks behind a gate, our kernel alone and after FlashAttention, against plain torch: rings, poison."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from kernel_tools import DEVICE, INTERPRETED, run_interpreted, runs_kernel, starts_interpreter
from slow_flash import slow_flash

pytest.importorskip("triton")

from vllm_kvplug.kernels.sparse_prefill import Columns, sparse_prefill_plan  # noqa: E402

from vllm_kvplug.memory import Geometry  # noqa: E402
from vllm_kvplug.placement.pool import PagePool  # noqa: E402
from vllm_kvplug.placement.tables import PageTables, TableSizes  # noqa: E402
from vllm_kvplug.policies.base import LocalWindow  # noqa: E402
from vllm_kvplug.shape import ModelShape  # noqa: E402
from vllm_kvplug.worker.flash import FlashPlan  # noqa: E402
from vllm_kvplug.worker.sparse import SparsePlan, sparse_attention  # noqa: E402
from vllm_kvplug.worker.step import PrefillRow  # noqa: E402

NAN = float("nan")
UNBOUNDED = 1 << 30
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    """rows: tokens before the chunk and in it, of every request. tau: of scores in [0, 1). cut: a cap took the last
    `cut` tokens behind every ring.
    """

    name: str
    rows: tuple[tuple[int, int], ...]
    window: int = 32
    tau: float = 0.8
    sinks: int = 0
    heads: int = 2
    group: int = 3
    dim: int = 32
    cut: int = 0


CASES = [
    Case("first-chunk", ((0, 150),)),
    Case("inside-the-window", ((0, 9), (5, 20))),
    Case("one-token", ((0, 1), (40, 1), (5, 1))),
    Case("several-rows", ((0, 5), (70, 64), (100, 129), (17, 2), (32, 33)), heads=3, group=1, dim=64),
    Case("across-a-table-chunk", ((1100, 90),), tau=0.02, group=2, heads=1),
    Case("nothing-admitted", ((0, 100), (90, 70)), tau=1.0),
    Case("only-sinks", ((0, 100), (90, 70)), tau=1.0, sinks=5),
    Case("everything-admitted", ((0, 100), (90, 70)), tau=-1.0),
    Case("window-of-one", ((40, 50), (0, 20)), window=1),
    Case("window-inside-a-page", ((40, 90), (30, 20)), window=41, sinks=3),
    Case("capped", ((200, 60), (36, 9)), tau=0.5, cut=10, group=4, dim=64),
    Case("wide", ((60, 50),), heads=1, group=2, dim=128, window=16),
]


class Batch:
    """Requests whose earlier tokens lie on pages of a second layer's heads; all that nobody may read is NaN."""

    def __init__(self, case: Case, dtype: torch.dtype):
        generator = torch.Generator().manual_seed(0)
        self.case, self.scale, self.first_head = case, case.dim**-0.5, case.heads
        self.local = LocalWindow(case.window, case.tau, case.sinks)
        blocks = [-(-(before + tokens) // 16) + 2 for before, tokens in case.rows]
        sizes = TableSizes(len(case.rows), 2 * case.heads, 2048, sum(blocks) + 1, scored=True)
        self.tables = PageTables(sizes, DEVICE)
        self.tables.scores.fill_(torch.inf)
        pages = torch.full(((sum(blocks) + 1) * 2 * case.heads, 16, 2 * case.dim), NAN, dtype=dtype, device=DEVICE)
        self.pool = PagePool(pages)
        ids = (torch.randperm(sum(blocks), generator=generator) + 1).tolist()
        total = sum(tokens for _, tokens in case.rows) + 3  # other rows of the batch come first
        heads = (case.heads * case.group, case.heads, case.heads)
        self.query, self.key, self.value = (
            torch.full((total, n, case.dim), NAN, dtype=dtype, device=DEVICE) for n in heads
        )
        self.admitted = torch.ones((total, case.heads), dtype=torch.bool, device=DEVICE)
        self.rows: list[PrefillRow] = []
        self.kv, self.known, at = [], [], 3
        for slot, (before, tokens) in enumerate(case.rows):
            kv = torch.randn(before + tokens, case.heads, 2 * case.dim, generator=generator).to(DEVICE, dtype)
            scores = torch.rand(before + tokens, case.heads, generator=generator)
            scores[::7] = NAN  # as a gate of broken keys might say: not admitted
            row = torch.tensor([[ids.pop() for _ in range(blocks[slot])]], dtype=torch.int32, device=DEVICE)
            admitted = self.local.admits(scores, torch.arange(before + tokens)[:, None])
            self.known.append(self._store(slot, row, before, kv, scores, admitted))
            self.known[-1][before:] = admitted[before:]
            self.tables.extend(slot, row, before, before + tokens, 0, UNBOUNDED)  # the chunk itself is not written yet
            new = slice(at, at + tokens)
            drawn = torch.randn(tokens, case.heads * case.group, case.dim, generator=generator)
            self.query[new] = drawn.to(DEVICE, dtype)
            self.key[new], self.value[new] = kv[before:].chunk(2, -1)
            self.admitted[new] = admitted[before:].to(DEVICE)
            self.kv.append(kv)
            self.rows.append(PrefillRow("", slot, new, before, before + tokens, before, False))
            at += tokens
        self.out = torch.full_like(self.query, NAN)

    def _store(
        self, slot: int, row: torch.Tensor, before: int, kv: torch.Tensor, scores: torch.Tensor, admitted: torch.Tensor
    ) -> torch.Tensor:
        """The first `before` tokens as `Admitter` leaves them: the ring, and behind it what was admitted.

        Returns, of all tokens and heads, whether a token behind the ring is stored, bool [tokens, heads].
        """
        case, tables = self.case, self.tables
        stored = torch.zeros_like(admitted)
        if before == 0:
            return stored
        where = tables.extend(slot, row, 0, before, 0, UNBOUNDED)[:, self.first_head :]
        ring = sorted(range(max(before - case.window, 0), before), key=lambda p: p % case.window)
        for head in range(case.heads):
            behind = [p for p in range(before - len(ring)) if admitted[p, head]]
            behind = behind[: max(len(behind) - case.cut, 0)]
            order = torch.tensor(ring + behind)
            place = where[: len(order), head]
            self.pool.put(place, kv[order.to(DEVICE), head])
            tables.set_positions(place, order.to(DEVICE))
            tables.set_scores(place, scores[order, head].to(DEVICE))
            tables.lengths[slot, self.first_head + head] = len(order)
            stored[behind, head] = True
            stored[ring, head] = admitted[ring, head]
        return stored

    def run(self, through_flash: bool) -> torch.Tensor:
        device, case = torch.device(DEVICE), self.case
        described = [(row.slot, row.tokens.start, row.end - row.start, row.start, row.stored) for row in self.rows]
        tiles = sparse_prefill_plan(described, case.group, case.dim, self.query.dtype, device)
        beyond = FlashPlan.of(self.rows, case.heads, device) if through_flash else None
        new = self.out, self.query, self.key, self.value, self.admitted
        of_layer = self.pool.pages, self.tables, SparsePlan(tiles, beyond), self.first_head, self.scale, self.local
        sparse_attention(*new, *of_layer)
        return self.out

    def reference(self) -> torch.Tensor:
        """Every query over the whole history of its request, with a mask."""
        expected = torch.full(self.query.shape, NAN)
        for row, kv, known in zip(self.rows, self.kv, self.known, strict=True):
            keys, values = kv.float().cpu().chunk(2, -1)
            position = torch.arange(row.end)
            distance = position[row.start :, None] - position
            for head in range(self.query.shape[1]):
                of = head // self.case.group
                seen = (distance >= 0) & ((distance < self.case.window) | known[:, of])
                scores = self.query[row.tokens, head].float().cpu() @ keys[:, of].T * self.scale
                expected[row.tokens, head] = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values[:, of]
        return expected


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request) -> torch.dtype:
    if INTERPRETED and request.param == torch.bfloat16:
        pytest.skip("the interpreter computes with numpy, which has no bfloat16")
    return request.param


def check(batch: Batch, through_flash: bool) -> None:
    actual, tolerance = batch.run(through_flash).float().cpu(), TOLERANCE[batch.query.dtype]
    torch.testing.assert_close(actual, batch.reference(), rtol=tolerance, atol=tolerance, equal_nan=True)


@runs_kernel
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sparse_prefill(case: Case, dtype: torch.dtype) -> None:
    check(Batch(case, dtype), through_flash=False)


@runs_kernel
@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.window % 16 == 0 and max(before for before, _ in c.rows) > c.window],
    ids=lambda case: case.name,
)
def test_behind_flash_attention(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU with the library itself, which takes no float32; here something slow stands in."""
    if DEVICE == "cpu":
        monkeypatch.setattr("vllm_kvplug.worker.flash._attend", slow_flash)
    elif dtype == torch.float32:
        pytest.skip("the library knows no float32")
    check(Batch(case, dtype), through_flash=True)


def test_when_flash_attention_helps() -> None:
    """Where some row has tokens behind its ring, in whole pages that hold the model's own type."""
    shape, cpu = ModelShape(2, 2, 4, 64), torch.device("cpu")
    exact, fp8 = (Geometry.of_rank(shape, 0, torch.bfloat16, 4, 4096, pages) for pages in (None, torch.float8_e4m3fn))
    first, later = (PrefillRow("", 0, slice(0, 9), start, start + 9, start, False) for start in (32, 33))

    def helps(rows: list[PrefillRow], geometry: Geometry = exact, window: int = 32, flash: bool = True) -> bool:
        return SparsePlan.of(rows, geometry, LocalWindow(window, 0.5), flash, cpu).beyond is not None

    assert helps([later]) and helps([first, later]) and helps([later], window=16)
    assert not helps([first]) and not helps([later], fp8)
    assert not helps([later], window=30) and not helps([later], flash=False)


def test_columns() -> None:
    admitted = torch.rand(200, 3, generator=torch.Generator().manual_seed(0)) > torch.tensor([0.3, 0.9, 2.0])
    columns = Columns.of(admitted)
    for head in range(3):
        listed = admitted[:, head].nonzero().flatten()
        assert torch.equal(columns.columns[head, : len(listed)], listed.int())
        assert torch.equal(columns.ranks[head, 1:], admitted[:, head].cumsum(0).int())
    assert not columns.ranks[:, 0].any()


@starts_interpreter
def test_interpreted() -> None:
    run_interpreted(__file__)
