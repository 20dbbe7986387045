"""Keys in 1.5 bits a value: coarse means and a fine bit (YAKV, 2604.08426, App. E)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from vllm_kvplug.quant.higgs import Higgs

MEAN_KEYS = 8
"""Consecutive keys that share a mean."""


class ResidualCodes(NamedTuple):
    """T keys. means: uint8 [..., ceil(T / 8), pieces], mean_scale: float16 [..., ceil(T / 8)]; codes, scale: of the
    T residuals, as `Higgs.encode` gives them."""

    means: torch.Tensor
    mean_scale: torch.Tensor
    codes: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True)
class ResidualHiggs:
    """The mean of every 8 consecutive keys in 4 bits, and each key less its decoded mean in 1 bit.

    The means of a last group that is not full count its last key as often as is missing, as in the paper's code.
    A group must be complete or final when it is encoded: later keys would change its mean.
    Raises ValueError for dim outside 1 ... 256.
    """

    dim: int

    @property
    def coarse(self) -> Higgs:
        return Higgs(4, self.dim)

    @property
    def fine(self) -> Higgs:
        return Higgs(1, self.dim)

    def encode(self, keys: torch.Tensor) -> ResidualCodes:
        """keys [..., T, dim] -> their codes. A key with an inf or NaN makes its whole group NaN."""
        means, mean_scale = self.coarse.encode(group_means(keys.float()))
        residual = keys.float() - spread(self.coarse.decode(means, mean_scale), keys.shape[-2])
        return ResidualCodes(means, mean_scale, *self.fine.encode(residual))

    def decode(self, keys: ResidualCodes) -> torch.Tensor:
        """-> float32 [..., T, dim]."""
        means = self.coarse.decode(keys.means, keys.mean_scale)
        return spread(means, keys.scale.shape[-1]) + self.fine.decode(keys.codes, keys.scale)

    def scores(self, query: torch.Tensor, keys: ResidualCodes) -> torch.Tensor:
        """Dot products of the G queries of a KV head [..., G, dim] with the decoded keys, float32 [..., G, T]."""
        coarse = self.coarse.scores(self.coarse.lut(query), keys.means, keys.mean_scale)
        fine = self.fine.scores(self.fine.lut(query), keys.codes, keys.scale)
        return spread(coarse.unsqueeze(-1), fine.shape[-1]).squeeze(-1) + fine


def group_means(keys: torch.Tensor) -> torch.Tensor:
    """keys [..., T, d] -> means of every 8 keys, [..., ceil(T / 8), d]; the last key fills up the last group."""
    missing = -keys.shape[-2] % MEAN_KEYS
    filled = torch.cat([keys, keys[..., -1:, :].expand(*keys.shape[:-2], missing, -1)], -2)
    return filled.unflatten(-2, (-1, MEAN_KEYS)).mean(-2)


def spread(means: torch.Tensor, tokens: int) -> torch.Tensor:
    """means [..., groups, d] -> each token's, [..., tokens, d]."""
    return means.repeat_interleave(MEAN_KEYS, -2)[..., :tokens, :]
