"""Writing tokens into the page pool."""

from __future__ import annotations

import torch

from vllm_kvplug.placement.pool import PagePool


def test_put_is_what_gather_finds():
    """K comes first; the tokens between stay as they were."""
    pool = PagePool(torch.zeros(3, 16, 2 * 4))
    content = torch.arange(1.0, 25.0).view(3, 8)
    slots = torch.tensor([47, 0, 16])  # the last of all, and the first of two pages
    pool.put(slots, content)
    key, value = pool.gather(slots)
    assert torch.equal(key, content[:, :4]) and torch.equal(value, content[:, 4:])
    assert torch.equal(pool.pages[2, 15], content[0])
    assert torch.equal(pool.pages[0, 0], content[1])
    assert torch.equal(pool.pages[1, 0], content[2])
    assert pool.pages.count_nonzero() == 24


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
