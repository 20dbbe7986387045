"""The part of a model that policies and plans depend on."""

from __future__ import annotations

from dataclasses import dataclass

PAGE = 16
"""Tokens in a head page, and in a vLLM block."""


@dataclass(frozen=True)
class ModelShape:
    """Attention geometry of a model, counted over all tensor-parallel ranks.

    `kv_heads` and `query_heads` are per layer; `fingerprint` identifies the architecture
    (see `calibrate.profile.model_fingerprint`) so that a profile finds its model. `rotary`: by how much a position
    turns each pair (i, i + head_dim / 2) of a query or key; empty if that is not how this model's positions work.
    `page_itemsize`: bytes of a number in a head page.
    """

    layers: int
    kv_heads: int
    query_heads: int
    head_dim: int
    tensor_parallel: int = 1
    fingerprint: str = ""
    name: str = ""
    rotary: tuple[float, ...] = ()
    page_itemsize: int = 2

    @property
    def heads(self) -> int:
        """(layer, KV head) pairs of the whole model."""
        return self.layers * self.kv_heads

    @property
    def rank_kv_heads(self) -> int:
        """KV heads per layer that one tensor-parallel rank holds (replicated if there are too few)."""
        return max(1, self.kv_heads // self.tensor_parallel)

    @property
    def page_bytes(self) -> int:
        """Bytes of a head page."""
        return PAGE * 2 * self.head_dim * self.page_itemsize

    def rank_heads(self, rank: int) -> range:
        """Global KV heads of `rank`."""
        first = rank * self.kv_heads // self.tensor_parallel
        return range(first, first + self.rank_kv_heads)
