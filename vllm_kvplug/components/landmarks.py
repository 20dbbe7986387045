"""Landmarks: what remains in device memory of keys that are elsewhere, enough to say which of them a query wants.

A format says how many tokens' landmarks fit in a head page, writes them there, and scores a page for queries.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from vllm_kvplug import ops
from vllm_kvplug.quant.grids import CODES
from vllm_kvplug.quant.higgs import Higgs
from vllm_kvplug.quant.residual import MEAN_KEYS, ResidualCodes, ResidualHiggs, group_means, spread

GROUP = MEAN_KEYS
"""Tokens whose landmarks are never in two pages."""


class Landmarks(Protocol):
    """One format, for heads of one size and pages of so many bytes."""

    group_bytes: int
    """Of the landmarks of 8 tokens."""
    query_bytes: int
    """That scoring takes for a query."""
    float_copies: int
    """Of a key in float32, while it is encoded."""
    page_copies: int
    """Of a page, while it is scored."""

    def encode(self, keys: torch.Tensor) -> list[torch.Tensor]:
        """keys [..., T, d] after RoPE, T a multiple of 8 -> the parts of a page, each uint8 [..., bytes]."""

    def score(self, query: torch.Tensor, pages: torch.Tensor, page: torch.Tensor, tokens: int) -> torch.Tensor:
        """As `LandmarkPages.score`, of `tokens` tokens in each page."""


class HiggsLandmarks:
    """Keys in 2 bits a value, scored by look-up without decoding them (YAKV, 2604.08426)."""

    float_copies, page_copies = 0, 0

    def __init__(self, head_dim: int):
        self.higgs = Higgs(2, head_dim)
        self.group_bytes = GROUP * (self.higgs.pieces + 2)
        self.query_bytes = table_bytes(self.higgs)

    def encode(self, keys: torch.Tensor) -> list[torch.Tensor]:
        return [_bytes(part) for part in self.higgs.encode(keys)]

    def score(self, query: torch.Tensor, pages: torch.Tensor, page: torch.Tensor, tokens: int) -> torch.Tensor:
        shape = (*query.shape[:-1], page.shape[-1] * tokens)
        out = torch.empty(shape, dtype=torch.float32, device=query.device)
        ops.landmark_scores(out, self.higgs.lut(query).contiguous(), pages, page.contiguous(), tokens)
        return out


class ResidualLandmarks:
    """The mean of every 8 keys in 4 bits a value, and what each key differs from it in 1 bit (YAKV, App. E)."""

    float_copies, page_copies = 4, 2

    def __init__(self, head_dim: int):
        self.residual = ResidualHiggs(head_dim)
        self.group_bytes = self.residual.coarse.pieces + 2 + GROUP * (self.residual.fine.pieces + 2)
        self.query_bytes = table_bytes(self.residual.coarse) + table_bytes(self.residual.fine)

    def encode(self, keys: torch.Tensor) -> list[torch.Tensor]:
        return [_bytes(part) for part in self.residual.encode(keys)]

    def score(self, query: torch.Tensor, pages: torch.Tensor, page: torch.Tensor, tokens: int) -> torch.Tensor:
        coarse, fine, groups = self.residual.coarse.pieces, self.residual.fine.pieces, tokens // GROUP
        sizes = [groups * coarse, groups * 2, tokens * fine, tokens * 2]
        means, mean_scale, codes, scale = _parts(pages[page], sizes)
        keys = ResidualCodes(
            means.unflatten(-1, (-1, coarse)), _halves(mean_scale), codes.unflatten(-1, (-1, fine)), _halves(scale)
        )
        return self.residual.scores(query, keys)


class MeanLandmarks:
    """The mean of every 8 keys in float16, for all 8 tokens (ShadowKV, 2410.21465)."""

    float_copies, page_copies = 1, 4

    def __init__(self, head_dim: int):
        self.head_dim = head_dim
        self.group_bytes = 2 * head_dim
        self.query_bytes = 4 * head_dim

    def encode(self, keys: torch.Tensor) -> list[torch.Tensor]:
        return [_bytes(group_means(keys.float()).half())]

    def score(self, query: torch.Tensor, pages: torch.Tensor, page: torch.Tensor, tokens: int) -> torch.Tensor:
        (means,) = _parts(pages[page], [tokens // GROUP * 2 * self.head_dim])
        means = _halves(means).unflatten(-1, (-1, self.head_dim)).float()
        scores = query @ means.transpose(-1, -2)
        return spread(scores.unsqueeze(-1), scores.shape[-1] * GROUP).squeeze(-1)


FORMATS: dict[str, type[HiggsLandmarks] | type[ResidualLandmarks] | type[MeanLandmarks]] = {
    "higgs2": HiggsLandmarks,
    "residual": ResidualLandmarks,
    "means8": MeanLandmarks,
}


class LandmarkPages:
    """Landmarks of the format `name` in pages of `page_bytes`. Raises ValueError for heads that it does not take."""

    def __init__(self, name: str, head_dim: int, page_bytes: int):
        self.format: Landmarks = FORMATS[name](head_dim)
        self.page_bytes = page_bytes
        self.tokens = page_bytes // self.format.group_bytes * GROUP
        """Tokens whose landmarks fit in a page."""

    def encode(self, keys: torch.Tensor) -> torch.Tensor:
        """keys [H, n, d] after RoPE -> uint8 [H, ceil(n / tokens), page_bytes]. The last key fills up the last page."""
        missing = -keys.shape[1] % self.tokens
        filled = torch.cat([keys, keys[:, -1:].expand(-1, missing, -1)], 1).unflatten(1, (-1, self.tokens))
        parts = torch.cat(self.format.encode(filled), -1)
        return F.pad(parts, (0, self.page_bytes - parts.shape[-1]))

    def score(self, query: torch.Tensor, pages: torch.Tensor, page: torch.Tensor) -> torch.Tensor:
        """Dot products with the keys that landmarks stand for, float32 [R, H, G, M * tokens].

        query [R, H, G, d]; pages uint8 [N, page_bytes]; page int64 [R, H, M], the pages of each row and head, in order.
        """
        return self.format.score(query.float(), pages, page, self.tokens)


def table_bytes(higgs: Higgs) -> int:
    """Of a query's look-up table."""
    return 4 * CODES * higgs.pieces


def _bytes(part: torch.Tensor) -> torch.Tensor:
    """[..., tokens] or [..., tokens, n] in pages [H, M, tokens, ...] -> uint8 [H, M, bytes]."""
    return part.flatten(2).contiguous().view(torch.uint8)


def _halves(part: torch.Tensor) -> torch.Tensor:
    return part.contiguous().view(torch.float16)


def _parts(pages: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """pages uint8 [..., M, page_bytes] -> their parts of so many bytes, those of all M together: [..., M * size]."""
    return [part.flatten(-2) for part in pages[..., : sum(sizes)].split(sizes, -1)]
