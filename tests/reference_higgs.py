"""HIGGS in plain torch, the definition that the ops are held to."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from vllm_kvplug.quant.hadamard import hadamard


def sylvester(n: int) -> torch.Tensor:
    """The +-1 Hadamard matrix, float64 [n, n]."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < n:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    return matrix


def encode(x: torch.Tensor, grid: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [N, D] -> codes uint8 [N, group / p], scale float16 [N]."""
    x, grid = F.pad(x.float(), (0, group - x.shape[-1])), grid.float()
    norm = x.double().square().sum(-1).sqrt().float().clamp(max=65504)
    scale = torch.where(x.isfinite().all(-1), norm, torch.nan).half()
    divisor = torch.where(scale == 0, 1, scale.float())
    z = (hadamard(x) / divisor[:, None]).clamp(-65504, 65504).half().float()
    z = z.unflatten(-1, (-1, grid.shape[-1]))  # [N, pieces, p]
    score = torch.zeros(len(grid))
    for j in range(grid.shape[-1]):
        score = score + grid[:, j] * grid[:, j]
    score = -0.5 * score
    for j in range(grid.shape[-1]):
        score = score + z[..., j, None] * grid[:, j]
    return score.nan_to_num(nan=0.0, neginf=float("-inf")).argmax(-1).to(torch.uint8), scale


def decode(codes: torch.Tensor, scale: torch.Tensor, grid: torch.Tensor, dim: int) -> torch.Tensor:
    """-> float64 [N, dim]."""
    turned = grid.double()[codes.long()].flatten(-2)
    back = turned @ sylvester(turned.shape[-1]) / turned.shape[-1]
    return (scale.double()[:, None] * back)[:, :dim]
