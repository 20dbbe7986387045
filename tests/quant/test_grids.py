"""The shipped grids, and the script that makes them."""

from __future__ import annotations

import pytest
import torch

from vllm_kvplug.quant.grids import Bits, grid_metadata, load_grid, piece
from vllm_kvplug.quant.make_grids import lloyd, measured_mse, nearest

CPU = torch.device("cpu")


@pytest.mark.parametrize("bits, p, mse", [(4, 2, 0.0079), (2, 4, 0.097), (1, 8, 0.321)])
def test_shipped_grids(bits: Bits, p: int, mse: float):
    """On samples that no seed of the script has drawn."""
    grid = load_grid(bits, CPU)
    assert grid.shape == (256, p) and grid.dtype == torch.float16 and piece(bits) == p
    assert len(grid.unique(dim=0)) == 256
    assert (grid.float().norm(dim=-1).diff() > -1e-3).all()  # sorted before rounding
    found = measured_mse(grid, seed=4242, samples=200_000)
    assert found == pytest.approx(mse, rel=0.02)
    assert found == pytest.approx(float(grid_metadata()[f"p{p}.mse"]), rel=0.01)


def test_code_vectors_are_the_means_of_their_cells():
    """What Lloyd's algorithm converges to; a wrong assignment or update would leave a bias."""
    grid = load_grid(2, CPU).float()
    x = torch.randn((400_000, 4), generator=torch.Generator().manual_seed(1))
    codes = nearest(x, grid)
    means = torch.zeros(256, 4).index_add_(0, codes, x) / torch.bincount(codes, minlength=256)[:, None]
    assert (means - grid).square().mean() < 1e-3


def test_nearest():
    x, grid = torch.randn(5000, 3), torch.randn(256, 3)
    assert torch.equal(nearest(x, grid), torch.cdist(x, grid, compute_mode="donot_use_mm_for_euclid_dist").argmin(-1))


def test_lloyd_is_seeded_and_improves():
    few = dict(samples=4000, rounds=2)
    first = lloyd(4, seed=3, **few)
    assert torch.equal(first, lloyd(4, seed=3, **few))
    assert (first.float().norm(dim=-1).diff() > -1e-3).all()
    assert not torch.equal(first, lloyd(4, seed=4, **few))
    longer = lloyd(4, seed=3, samples=8000, rounds=12)
    assert measured_mse(longer, 1, 20_000) < 0.97 * measured_mse(first, 1, 20_000)


def test_lloyd_keeps_vectors_without_samples():
    assert lloyd(8, seed=0, samples=40, rounds=3).isfinite().all()


def test_one_tensor_per_device():
    """A captured CUDA graph reads the grid at its address."""
    assert load_grid(4, CPU) is load_grid(4, torch.device("cpu"))


@pytest.mark.parametrize("bits", [0, 3, 8])
def test_other_widths(bits: int):
    with pytest.raises(ValueError, match=f"not for {bits}"):
        piece(bits)  # type: ignore[arg-type]
