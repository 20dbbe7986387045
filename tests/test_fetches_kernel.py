"""Where fetched tokens come from and go to, against sorted lists."""

from __future__ import annotations

import pytest
import torch
from kernel_tools import DEVICE, run_interpreted, runs_kernel, starts_interpreter

from vllm_kvplug.placement.tables import PageTables, TableSizes

HEADS = 6


@runs_kernel
@pytest.mark.parametrize("tokens", [1, 15, 64, 700, 2048, 2049, 5000])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_fetches(tokens: int, share: float) -> None:
    from vllm_kvplug.kernels.fetches import fetches

    generator = torch.Generator().manual_seed(tokens)
    tables = PageTables(TableSizes(2, HEADS, tokens, -(-tokens // 16) + 1), "cpu")
    row = 1 + torch.randperm(-(-tokens // 16), generator=generator, dtype=torch.int32)[None]
    tables.extend(1, row, 0, tokens, 0, 1 << 30)
    rank = torch.stack([torch.randperm(tokens, generator=generator) for _ in range(3)])
    slots = torch.randperm(400, generator=generator)[: 4 * (-(-tokens // 64))].view(4, -1)
    pivots, heads, host_rows = [2, 0, 2, 1], [5, 1, 0, 3], [0, 3, 1, 2]
    counts = [round(share * tokens), 1, min(tokens, 2), tokens]
    begins = [sum(counts[:i]) for i in range(4)]
    columns, total = torch.tensor([pivots, heads, counts, begins, host_rows]), sum(counts)
    rooms = (rank, columns, tables.directory[1], tables.chunks, slots)
    found = fetches(*(room.to(DEVICE) for room in rooms), total)
    positions, target, rows = (x.cpu() for x in found)
    for pivot, head, count, begin, host_row in columns.T.tolist():
        mine = slice(begin, begin + count)
        best = rank[pivot].argsort()[:count].sort().values
        assert torch.equal(positions[mine], best)
        assert torch.equal(target[mine], tables.locate(1, head, torch.arange(count)))
        assert torch.equal(rows[mine], slots[host_row, best // 64] * 64 + best % 64)


@runs_kernel
def test_nothing_to_fetch() -> None:
    from vllm_kvplug.kernels.fetches import fetches

    nothing = torch.empty((5, 0), dtype=torch.int64, device=DEVICE)
    some = torch.zeros((1, 8), dtype=torch.int32, device=DEVICE)
    assert all(len(x) == 0 for x in fetches(some.long(), nothing, some, some, some.long(), 0))


@starts_interpreter
def test_interpreted() -> None:
    run_interpreted(__file__)
