"""R-KV's scores against the reference's loops."""

from __future__ import annotations

import pytest
import torch
from reference_rkv import RKV, Eviction

from vllm_kvplug.components import redundancy as module
from vllm_kvplug.components.redundancy import importance, redundancy


def keys_of(heads: int, tokens: int) -> torch.Tensor:
    """Some of them alike, as keys of one head are."""
    generator = torch.Generator().manual_seed(tokens)
    kinds = torch.randn(heads, 5, 16, generator=generator)
    chosen = torch.randint(5, (tokens,), generator=generator)
    return kinds[:, chosen] + 0.7 * torch.randn(heads, tokens, 16, generator=generator)


@pytest.mark.parametrize("rows", [256, 7])
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("tokens", [9, 16, 60])
def test_scores_are_those_of_the_reference(monkeypatch: pytest.MonkeyPatch, tokens: int, weight: float, rows: int):
    """Two KV heads of three query heads each."""
    monkeypatch.setattr(module, "ROWS", rows)
    keys = keys_of(2, tokens)
    queries = torch.randn(8, 6, 16, generator=torch.Generator().manual_seed(1))
    found = weight * importance(queries, keys[:, :-8], 0.3, 7) - (1 - weight) * redundancy(keys)[:, :-8]
    watcher = Eviction(RKV(importance=weight), [])
    for head in range(2):
        expected = watcher.scores(queries[:, 3 * head : 3 * head + 3].transpose(0, 1), keys[head], 0.3)[:-8]
        torch.testing.assert_close(found[head], expected, atol=1e-6, rtol=1e-5)


def test_of_many_alike_the_newest_stays():
    keys = torch.eye(8)[None, [0, 1, 0, 2, 0, 3]].contiguous()
    redundant = redundancy(keys)[0]
    assert redundant[[1, 3, 5]].max() < redundant[2] < redundant[0]
    assert redundant[4] < redundant[2], "the newest of three"
    torch.testing.assert_close(redundant.sum(), torch.tensor(1.0))


def test_keys_of_no_length():
    assert redundancy(torch.zeros(2, 10, 16)).isfinite().all()
