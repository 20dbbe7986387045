"""The grids: 256 code vectors of p dimensions, made for Gaussian data by `make_grids` and shipped with the package."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal, get_args

import torch
from safetensors import safe_open

Bits = Literal[1, 2, 4]
"""Bits per value: a code of 8 bits stands for 8, 4 or 2 values."""

CODES = 256
GRIDS_FILE = Path(__file__).with_name("grids.safetensors")


def piece(bits: Bits) -> int:
    """Values that share a code. Raises ValueError for bits that no grid is there for."""
    if bits not in get_args(Bits):
        raise ValueError(f"HIGGS has grids for {get_args(Bits)} bits per value, not for {bits}")
    return 8 // bits


@functools.cache
def load_grid(bits: Bits, device: torch.device) -> torch.Tensor:
    """The grid, float16 [256, p], shortest code vector first. One tensor per device: do not change it."""
    with safe_open(GRIDS_FILE, framework="pt") as file:
        return file.get_tensor(f"p{piece(bits)}").to(device)


def grid_metadata() -> dict[str, str]:
    """How the shipped grids were made, and their measured squared error per dimension (`p2.mse` and so on)."""
    with safe_open(GRIDS_FILE, framework="pt") as file:
        return file.metadata()
