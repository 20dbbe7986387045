"""The Walsh-Hadamard transform that makes the values of a key look Gaussian."""

from __future__ import annotations

import torch


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """x @ H of the last dimension, H the unnormalised +-1 Sylvester matrix: hadamard(hadamard(x)) = n * x.

    x: [..., n] of any floating dtype, n a power of two. Returns a new tensor of x's shape and dtype.
    Neighbours are added first, then pairs, fours and so on, as in csrc: float32 results are equal bit for bit.

    Raises ValueError if n is not a power of two.
    """
    n = x.shape[-1]
    if n < 1 or n & (n - 1):
        raise ValueError(f"hadamard: the last dimension must be a power of two, got {n}")
    step = 1
    while step < n:
        low, high = x.unflatten(-1, (n // (2 * step), 2, step)).unbind(-2)
        x = torch.stack([low + high, low - high], -2).flatten(-3)
        step *= 2
    return x.clone() if n == 1 else x
