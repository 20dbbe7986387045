"""Makes the shipped grids by Lloyd's algorithm on standard Gaussian samples.

    python -m vllm_kvplug.quant.make_grids [--out FILE]

Seeded: the same torch build on the same kind of CPU makes the same grids.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file

from vllm_kvplug.quant.grids import CODES, GRIDS_FILE

PIECES = (2, 4, 8)
SAMPLES = 60_000  # of the last round
ROUNDS = 80
TEST_SAMPLES = 500_000
CACHED_ROWS = 4096  # their distances to all code vectors fit a core's cache


def nearest(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """Index of the code vector of `grid` [n, p] nearest to each row of x [N, p], int64 [N]."""
    norms = grid.square().sum(-1)
    return torch.cat([torch.addmm(norms, part, grid.T, alpha=-2).argmin(-1) for part in x.split(CACHED_ROWS)])


def lloyd(p: int, seed: int, samples: int = SAMPLES, rounds: int = ROUNDS) -> torch.Tensor:
    """A grid of 256 code vectors for N(0, I_p), float16 [256, p], shortest first.

    Each round draws fresh samples, gives each to its nearest code vector and moves the vectors to the means of
    what they were given. Rounds grow linearly to `samples`: only the last ones need to be precise.
    """
    generator = torch.Generator().manual_seed(seed)
    grid = torch.randn((CODES, p), generator=generator)
    for done in range(1, rounds + 1):
        x = torch.randn((samples * done // rounds, p), generator=generator)
        codes = nearest(x, grid)
        count = torch.bincount(codes, minlength=CODES)[:, None]
        mean = torch.zeros_like(grid).index_add_(0, codes, x) / count.clamp(min=1)
        grid = torch.where(count > 0, mean, grid)
    return grid[grid.square().sum(-1).argsort()].half()


def measured_mse(grid: torch.Tensor, seed: int, samples: int = TEST_SAMPLES) -> float:
    """Mean squared error per dimension of fresh Gaussian samples."""
    x = torch.randn((samples, grid.shape[-1]), generator=torch.Generator().manual_seed(seed))
    return (x - grid.float()[nearest(x, grid.float())]).square().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=GRIDS_FILE)
    out = parser.parse_args().out
    grids, metadata = {}, {"made by": "python -m vllm_kvplug.quant.make_grids", "torch": torch.__version__}
    metadata |= {
        "method": f"Lloyd, {ROUNDS} rounds growing to {SAMPLES} fresh N(0, I) samples",
        "seeds": "p; mse: 1000 + p",
    }
    for p in PIECES:
        grids[f"p{p}"] = lloyd(p, seed=p)
        metadata[f"p{p}.mse"] = f"{measured_mse(grids[f'p{p}'], seed=1000 + p):.5f}"
        print(f"p={p}: squared error per dimension {metadata[f'p{p}.mse']}", flush=True)
    save_file(grids, out, metadata)


if __name__ == "__main__":
    main()
