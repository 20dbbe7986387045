"""The fast transform against the matrix."""

from __future__ import annotations

import pytest
import torch
from reference_higgs import sylvester

from vllm_kvplug.quant.hadamard import hadamard


def test_the_matrix():
    assert sylvester(4).tolist() == [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 4, 16, 64, 256])
@pytest.mark.parametrize("lead", [(), (3,), (2, 0), (2, 5)], ids=str)
def test_is_the_matrix(n: int, lead: tuple[int, ...], dtype: torch.dtype):
    x = torch.randn(*lead, n, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = x.clone()
    found = hadamard(x)
    assert found.dtype == dtype and found.shape == x.shape and torch.equal(x, before)
    assert found.data_ptr() != x.data_ptr() or not x.numel()
    torch.testing.assert_close(found.double(), x.double() @ sylvester(n), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(hadamard(found), n * x, rtol=1e-5, atol=1e-4)


def test_strided():
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(hadamard(x.T), hadamard(x.T.contiguous()))
    assert torch.equal(hadamard(x[:, ::2]), hadamard(x[:, ::2].contiguous()))


@pytest.mark.parametrize("n", [0, 3, 12, 96])
def test_other_sizes(n: int):
    with pytest.raises(ValueError, match=f"power of two, got {n}"):
        hadamard(torch.zeros(2, n))
