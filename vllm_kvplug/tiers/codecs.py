"""How K and V lie in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from vllm_kvplug.quant.higgs import Higgs

CodecName = Literal["auto", "fp8", "higgs4"]
FP8_MAX = 448.0  # largest finite float8_e4m3fn
HIGGS_BITS: Literal[4] = 4


class Format(Protocol):
    """One way to store pairs of K and V, [..., 2, head_dim]."""

    def token_bytes(self, head_dim: int, itemsize: int) -> int: ...

    def encode(self, pair: torch.Tensor) -> torch.Tensor:
        """-> uint8 [..., token bytes]."""

    def decode(self, rows: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """-> [..., 2, head_dim] of `dtype`."""


class AsTheyAre:
    """Every bit of K and V."""

    def token_bytes(self, head_dim: int, itemsize: int) -> int:
        return 2 * head_dim * itemsize

    def encode(self, pair: torch.Tensor) -> torch.Tensor:
        return pair.flatten(-2).contiguous().view(torch.uint8)

    def decode(self, rows: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        return rows.view(dtype).unflatten(-1, (2, head_dim))


class Fp8:
    """e4m3 with a float16 scale for K and one for V."""

    def token_bytes(self, head_dim: int, itemsize: int) -> int:
        return 2 * head_dim + 4

    def encode(self, pair: torch.Tensor) -> torch.Tensor:
        # Rounding the scale down may push the largest value just over the top: it is clamped.
        scale = (pair.float().abs().amax(-1) / FP8_MAX).clamp(2.0**-14, 65504.0).half()
        codes = (pair.float() / scale.float().unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        return _join(codes.view(torch.uint8), scale)

    def decode(self, rows: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        codes, scale = _split(rows)
        pair = codes.view(torch.float8_e4m3fn).float() * scale.float().unsqueeze(-1)
        most = torch.finfo(dtype).max  # float16 could overflow where the scale was rounded up
        return pair.clamp(-most, most).to(dtype)


class Higgs4:
    """Four bits a value: K and V one HIGGS row each, of head_dim padded to a power of two."""

    def token_bytes(self, head_dim: int, itemsize: int) -> int:
        return 2 * Higgs(HIGGS_BITS, head_dim).pieces + 4

    def encode(self, pair: torch.Tensor) -> torch.Tensor:
        return _join(*Higgs(HIGGS_BITS, pair.shape[-1]).encode(pair))

    def decode(self, rows: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        return Higgs(HIGGS_BITS, head_dim).decode(*_split(rows), dtype)


FORMATS: dict[CodecName, Format] = {"auto": AsTheyAre(), "fp8": Fp8(), "higgs4": Higgs4()}


def token_bytes(name: CodecName, head_dim: int, itemsize: int) -> int:
    """Bytes of K and V of one token of one head; itemsize: of the engine's K and V.

    Raises ValueError for "higgs4" and a head_dim beyond 256.
    """
    return FORMATS[name].token_bytes(head_dim, itemsize)


@dataclass(frozen=True)
class Codec:
    """Tokens' K and V as `name` stores them: as they are ("auto"), in 8 bits ("fp8") or in 4 ("higgs4")."""

    name: CodecName
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return token_bytes(self.name, self.head_dim, self.dtype.itemsize)

    def encode(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """key, value [..., head_dim] -> uint8 [..., token_bytes], on their device."""
        return FORMATS[self.name].encode(torch.stack([key, value], -2))

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """uint8 [..., token_bytes] -> [..., 2 * head_dim] of `dtype`: K, then V."""
        return FORMATS[self.name].decode(rows, self.head_dim, self.dtype).flatten(-2)


def _join(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """codes uint8 [..., 2, n], scale float16 [..., 2] -> uint8 [..., 2 * n + 4]."""
    return torch.cat([codes.flatten(-2), scale.contiguous().view(torch.uint8)], -1)


def _split(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scale = rows.split([rows.shape[-1] - 4, 4], -1)
    return codes.contiguous().unflatten(-1, (2, -1)), scale.contiguous().view(torch.float16)
