"""The HIGGS quantiser, one group of values per head (YAKV, 2604.08426; with a fixed transform, as in its code)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from vllm_kvplug import ops
from vllm_kvplug.quant.grids import Bits, load_grid, piece
from vllm_kvplug.quant.hadamard import hadamard

MIN_GROUP, MAX_GROUP = 16, 256


def group_of(dim: int) -> int:
    """Values that a row of `dim` is padded to: a power of two from 16 to 256. Raises ValueError if it is longer."""
    if not 1 <= dim <= MAX_GROUP:
        raise ValueError(f"HIGGS takes heads of 1 to {MAX_GROUP} values, not of {dim}")
    return max(MIN_GROUP, 1 << (dim - 1).bit_length())


@dataclass(frozen=True)
class Higgs:
    """Rows of `dim` values in `bits` bits a value and a float16 norm. Works on any device.

    A row is padded with zeros to a power of two, transformed, divided by its norm and cut into pieces of p = 8 / bits
    values, of which each becomes the index of the nearest of 256 code vectors.

    Raises ValueError for bits other than 1, 2 and 4, and for dim outside 1 ... 256.
    """

    bits: Bits
    dim: int

    def __post_init__(self) -> None:
        piece(self.bits)
        group_of(self.dim)

    @property
    def group(self) -> int:
        return group_of(self.dim)

    @property
    def pieces(self) -> int:
        """Codes of a row, which are also its bytes without the scale."""
        return self.group // piece(self.bits)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [..., dim] of float32, bfloat16 or float16 -> codes uint8 [..., pieces], scale float16 [...].

        A row of zeros, or whose norm float16 rounds to zero, decodes to zeros; a row with an inf or NaN to NaN.
        Norms beyond 65504 are cut to that. Raises ValueError if the last dimension is not `dim`.
        """
        self._check("x", x, self.dim)
        codes = torch.empty((*x.shape[:-1], self.pieces), dtype=torch.uint8, device=x.device)
        scale = torch.empty(x.shape[:-1], dtype=torch.float16, device=x.device)
        rows = x.reshape(-1, self.dim).contiguous()
        ops.higgs_encode(codes.view(-1, self.pieces), scale.view(-1), rows, load_grid(self.bits, x.device))
        return codes, scale

    def decode(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """codes [..., pieces], scale [...] -> [..., dim] of `dtype`: float32, bfloat16 or float16.

        Raises ValueError if the last dimension of codes is not `pieces`.
        """
        self._check("codes", codes, self.pieces)
        out = torch.empty((*codes.shape[:-1], self.dim), dtype=dtype, device=codes.device)
        flat = codes.reshape(-1, self.pieces).contiguous(), scale.reshape(-1).contiguous()
        ops.higgs_decode(out.view(-1, self.dim), *flat, load_grid(self.bits, codes.device))
        return out

    def lut(self, query: torch.Tensor) -> torch.Tensor:
        """query [..., dim] -> float32 [..., pieces, 256]: its share of the score for every piece and code.

        Keys are never transformed back: q . H(c) / group = H(q) . c / group.
        """
        self._check("query", query, self.dim)
        turned = hadamard(F.pad(query.float(), (0, self.group - self.dim))) / self.group
        return turned.unflatten(-1, (self.pieces, -1)) @ load_grid(self.bits, query.device).float().T

    def scores(self, lut: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Dot products with the decoded keys, float32 [..., G, T].

        lut [..., G, pieces, 256] of the G queries that share a KV head, codes [..., T, pieces], scale [..., T].
        """
        out = torch.empty((*lut.shape[:-2], codes.shape[-2]), dtype=torch.float32, device=lut.device)
        heads = math.prod(lut.shape[:-3])
        ops.higgs_scores(
            out.view(heads, *out.shape[-2:]),
            lut.reshape(heads, *lut.shape[-3:]).contiguous(),
            codes.reshape(heads, *codes.shape[-2:]),
            scale.reshape(heads, scale.shape[-1]),
        )
        return out

    def _check(self, name: str, x: torch.Tensor, size: int) -> None:
        if x.shape[-1] != size:
            raise ValueError(
                f"HIGGS of {self.dim} values in {self.bits} bits: {name} ends in {x.shape[-1]}, not {size}"
            )
