"""Pivots' attention read from pages, against the plain formula over gathered keys."""

from __future__ import annotations

import pytest
import torch
from kernel_tools import DEVICE, run_interpreted, runs_kernel, starts_interpreter

from vllm_kvplug.components.drift import pivot_scores as expected_scores
from vllm_kvplug.placement.pool import FP8, PagePool
from vllm_kvplug.placement.tables import PageTables, TableSizes

HEADS = 5


def a_prompt(tokens: int, dim: int, dtype: torch.dtype) -> tuple[PagePool, PageTables]:
    """Pages of one request in a random order of blocks; what is not its own is NaN."""
    blocks = -(-tokens // 16)
    pages = torch.full(((blocks + 1) * HEADS, 16, 2 * dim), torch.nan)
    tables = PageTables(TableSizes(2, HEADS, tokens, blocks + 1), "cpu")
    row = 1 + torch.randperm(blocks, dtype=torch.int32)[None]
    place = tables.extend(1, row, 0, tokens, 0, 1 << 30)
    pages.view(-1, 2 * dim)[place.flatten()] = torch.randn(place.numel(), 2 * dim)
    return PagePool(pages.to(dtype), torch.bfloat16 if dtype == FP8 else dtype), tables


@runs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 16, 63, 65, 1024, 1100, 2500])
@pytest.mark.parametrize("count, group, dim, width", [(6, 4, 64, 5), (2, 1, 16, 1), (6, 3, 128, 7)])
def test_scores(dtype: torch.dtype, tokens: int, count: int, group: int, dim: int, width: int) -> None:
    from vllm_kvplug.kernels.pivot_scores import pivot_scores

    if dtype != torch.float32 and DEVICE == "cpu":
        pytest.skip("the interpreter multiplies float32 matrices alone")
    torch.manual_seed(tokens)
    pool, tables = a_prompt(tokens, dim, dtype)
    heads = torch.tensor([4, 0, 3])
    queries = torch.randn(3, count, group, dim, dtype=pool.dtype)
    keys = pool.keys(tables.locate(1, heads[:, None], torch.arange(tokens)))
    expected = expected_scores(queries, keys, dim**-0.5, width)
    rooms = (pool.pages, tables.directory[1], tables.chunks, heads)
    rooms = [room.to(DEVICE) for room in rooms]
    found = pivot_scores(queries.to(DEVICE), *rooms, tokens, dim**-0.5, width)
    torch.testing.assert_close(found.cpu(), expected, atol=1e-6, rtol=2e-4)


@runs_kernel
def test_a_broken_key_is_no_nan() -> None:
    from vllm_kvplug.kernels.pivot_scores import pivot_scores

    pool, tables = a_prompt(40, 32, torch.float32)
    pool.pages.view(-1, 64)[tables.locate(1, 2, torch.tensor([7]))] = torch.nan
    rooms = (pool.pages, tables.directory[1], tables.chunks, torch.tensor([2]))
    found = pivot_scores(torch.randn(1, 2, 2, 32).to(DEVICE), *(r.to(DEVICE) for r in rooms), 40, 1.0, 5)
    assert not found.isnan().any()


@starts_interpreter
def test_interpreted() -> None:
    run_interpreted(__file__)
