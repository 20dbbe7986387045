"""How K and V lie in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

CodecName = Literal["auto", "fp8"]
FP8_MAX = 448.0  # largest finite float8_e4m3fn


def token_bytes(name: CodecName, head_dim: int, itemsize: int) -> int:
    """Bytes of K and V of one token of one head; itemsize: of the engine's K and V."""
    return 2 * head_dim + 4 if name == "fp8" else 2 * head_dim * itemsize


@dataclass(frozen=True)
class Codec:
    """K and V of a token as they are ("auto"), or in e4m3 with a float16 scale for K and one for V ("fp8")."""

    name: CodecName
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return token_bytes(self.name, self.head_dim, self.dtype.itemsize)

    def encode(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """key, value [..., head_dim] -> uint8 [..., token_bytes], on their device."""
        both = torch.stack([key, value], -2)  # [..., 2, d]
        if self.name == "auto":
            return both.flatten(-2).contiguous().view(torch.uint8)
        # Rounding the scale down may push the largest value just over the top: it is clamped.
        scale = (both.float().abs().amax(-1, keepdim=True) / FP8_MAX).clamp(2.0**-14, 65504.0).half()
        codes = (both.float() / scale.float()).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        parts = [codes.flatten(-2).view(torch.uint8), scale.flatten(-2).contiguous().view(torch.uint8)]
        return torch.cat(parts, -1)

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """uint8 [..., token_bytes] -> [..., 2 * head_dim] of `dtype`: K, then V."""
        if self.name == "auto":
            return rows.view(self.dtype)
        codes, scale = rows.split([2 * self.head_dim, 4], -1)
        both = codes.contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (2, self.head_dim))
        both = both * scale.contiguous().view(torch.float16).float().unsqueeze(-1)
        most = torch.finfo(self.dtype).max  # float16 could overflow where the scale was rounded up
        return both.flatten(-2).clamp(-most, most).to(self.dtype)
