"""Writing tokens into the page pool."""

from __future__ import annotations

import pytest
import torch

from vllm_kvplug.placement.pool import PagePool

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_put_is_what_gather_finds(dtype: torch.dtype):
    """K comes first; the tokens between stay as they were."""
    pool = PagePool(torch.zeros(3, 16, 2 * 4, device=DEVICE).to(dtype), None if dtype.itemsize > 1 else torch.float32)
    content = torch.arange(1.0, 25.0, device=DEVICE).view(3, 8).to(pool.dtype)
    expected = content.to(dtype)
    slots = torch.tensor([47, 0, 16], device=DEVICE)  # the last of all, and the first of two pages
    pool.put(slots, content)
    key, value = pool.gather(slots)
    assert torch.equal(torch.cat([key, value], -1), expected.to(pool.dtype))
    for (page, offset), row in zip(((2, 15), (0, 0), (1, 0)), expected, strict=True):
        assert torch.equal(pool.pages[page, offset].float(), row.float())
    assert pool.pages.float().count_nonzero() == 24


def test_put_reaches_the_layers_cache():
    """Two layers of two heads, two blocks: a page of layer 1 is seen through its own cache."""
    memory = torch.zeros(2, 2, 2, 16, 6)  # blocks, layers, heads, tokens, K and V
    pool = PagePool.over(memory[:, 0], layers=2)
    pool.put(torch.tensor([(1 * 4 + 1 * 2 + 0) * 16 + 5]), torch.full((1, 6), 7.0))
    assert memory[1, 1, 0, 5].tolist() == [7.0] * 6
    assert memory.count_nonzero() == 6


def test_put_nothing():
    pool = PagePool(torch.zeros(1, 16, 2))
    pool.put(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 2))
    assert not pool.pages.any()
