"""The append kernel against `PageTables` in plain torch, in lifecycles of several requests."""

from __future__ import annotations

import pytest
import torch
from kernel_tools import DEVICE, run_interpreted, runs_kernel, starts_interpreter

from vllm_kvplug.placement.tables import PageTables, TableSizes

UNBOUNDED = 1 << 30
STATE = ("lengths", "positions", "_num_free", "_taken")


class Twins:
    """The same requests in tables that torch and the kernel keep; every step compares them."""

    def __init__(self, slots: int, heads: int, blocks_of: list[int], max_tokens: int = 4096):
        self.slots, self.heads = slots, heads
        total = sum(blocks_of) + 1
        sizes = TableSizes(slots, heads, max_tokens, total)
        self.torch, self.kernel = (PageTables(sizes, DEVICE) for _ in range(2))
        shuffled = (torch.randperm(total - 1) + 1).tolist()
        self.rows = torch.zeros((slots, max(blocks_of)), dtype=torch.int32, device=DEVICE)
        for slot, count in enumerate(blocks_of):
            self.rows[slot, :count] = torch.tensor([shuffled.pop() for _ in range(count)], device=DEVICE)

    def prefill(self, slot: int, tokens: int, ring: int = UNBOUNDED, sinks: int = 0) -> None:
        for tables in (self.torch, self.kernel):
            tables.extend(slot, self.rows[slot : slot + 1], 0, tokens, sinks, ring)

    def shrink(self, slot: int, kept: list[int], before: int, after: int) -> None:
        for tables in (self.torch, self.kernel):
            row = self.rows[slot : slot + 1]
            tables.shrink(slot, row, torch.tensor(kept, device=DEVICE), before, after, max(kept))

    def append(self, slots: list[int], positions: list[int], sinks: int = 0, ring: int = UNBOUNDED) -> None:
        from vllm_kvplug.kernels.append import append

        index = torch.tensor(slots, device=DEVICE)
        rows = self.rows[index.clamp_min(0)]
        last = torch.tensor(positions, device=DEVICE)
        expected = self.torch._append(index, rows, last, sinks, ring)
        place = torch.full((len(slots), self.heads), -7, device=DEVICE)
        append(self.kernel, place, index, rows, last, sinks, ring)
        assert torch.equal(place, expected)
        self.compare()

    def compare(self) -> None:
        for name in STATE:
            ours, theirs = getattr(self.kernel, name), getattr(self.torch, name)
            if name == "positions":  # torch writes what a mask turns off to a spare last page
                ours, theirs = ours[:-1], theirs[:-1]
            if name in ("lengths", "_taken"):
                ours, theirs = ours[: self.slots], theirs[: self.slots]
            assert torch.equal(ours, theirs), name
        for slot in range(self.slots):
            assert pages(self.kernel, slot) == pages(self.torch, slot)


def pages(tables: PageTables, slot: int) -> list[list[int]]:
    """Page ids of every head of a request: chunk ids may differ, since rows take chunks in any order."""
    found = []
    for head in range(tables.sizes.heads):
        count = -(-int(tables.lengths[slot, head]) // 16)
        chunks = tables.directory[slot, head].tolist()
        found.append([int(tables.chunks[chunks[j // 64], j % 64]) for j in range(count)])
    return found


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@runs_kernel
def test_rows_grow_side_by_side() -> None:
    """Padding rows with any position, rows in any order, heads that open pages and chunks."""
    twins = Twins(3, 5, [70, 4, 6])
    twins.prefill(0, 1000)
    twins.prefill(1, 31)
    for step in range(40):
        twins.append([1, -1, 0, -1], [31 + step if step < 30 else 61, 1 << 40, 1000 + step, -5][:4])


@runs_kernel
def test_from_nothing() -> None:
    twins = Twins(2, 3, [3, 3])
    for step in range(35):
        twins.append([0, 1], [step, step])


@runs_kernel
def test_after_shrinking() -> None:
    """Heads of unlike length take the pages that shrinking left over, then new blocks behind the dead entries."""
    twins = Twins(2, 4, [12, 12])
    for slot in range(2):
        twins.prefill(slot, 100)
        twins.shrink(slot, [100, 17, 48, 5], before=7, after=4)
    for step in range(50):
        twins.append([1, 0], [100 + step, 100 + step])


@runs_kernel
@pytest.mark.parametrize("ring, sinks", [(40, 4), (16, 0), (7, 3)])
def test_ring_overwrites(ring: int, sinks: int) -> None:
    twins = Twins(2, 3, [3, 3])
    twins.prefill(0, 20, ring, sinks)
    for step in range(60):
        twins.append([0, 1, -1], [20 + step, step, 3], sinks, ring)


@runs_kernel
def test_many_heads() -> None:
    twins = Twins(1, 90, [3])
    twins.prefill(0, 15)
    for step in range(3):
        twins.append([0], [15 + step])


@starts_interpreter
def test_interpreted() -> None:
    run_interpreted(__file__)
