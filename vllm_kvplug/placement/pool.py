"""The head pages of an engine's KV cache, seen as one array."""

from __future__ import annotations

import torch

from vllm_kvplug import ops
from vllm_kvplug.shape import PAGE

COPY_BYTES = 64 << 20
"""Most that is read before it is written when pages move."""

FP8 = torch.float8_e4m3fn
MOST_E4M3 = 448.0
"""The largest finite number of FP8 pages; what is larger is stored as this."""


def page_dtype(cache_dtype: torch.dtype) -> torch.dtype:
    """What pages hold where vLLM allocates `cache_dtype`: it takes bytes for FP8."""
    return FP8 if cache_dtype == torch.uint8 else cache_dtype


class PagePool:
    """All head pages, [pages, 16, 2 * head_dim]: K in the first half of the last dimension, V in the second.

    A view of vLLM's own KV allocation in layout BLHNC, where a block is layers * KV heads contiguous pages. Pages may
    be of e4m3 numbers; K and V come out of them, and go into them, as `dtype`.
    """

    def __init__(self, pages: torch.Tensor, dtype: torch.dtype | None = None):
        self.pages, self.dtype = pages, dtype or pages.dtype
        raw = pages.view(torch.uint8) if pages.dtype == FP8 else pages
        self._pages = raw  # for what moves as it is
        self._tokens = raw.view(-1, raw.shape[-1])
        self.bytes = raw.view(len(raw), -1).view(torch.uint8)
        """The same memory, [pages, bytes of a page], for what is not K and V."""

    @classmethod
    def over(cls, layer_cache: torch.Tensor, layers: int, dtype: torch.dtype | None = None) -> PagePool:
        """The pool that a layer's cache [blocks, KV heads, 16, 2 * head_dim] is a strided view of."""
        blocks, heads, tokens, content = layer_cache.shape
        if tokens != PAGE or layer_cache.stride(0) != layers * heads * tokens * content:
            raise RuntimeError(f"KV cache is not in layout BLHNC: {layer_cache.shape}, {layer_cache.stride()}")
        storage = layer_cache.untyped_storage()
        flat = torch.empty(0, dtype=page_dtype(layer_cache.dtype), device=layer_cache.device)
        shape = (blocks * layers * heads, tokens, content)
        return cls(flat.set_(storage, 0, shape, (tokens * content, content, 1)), dtype)

    def gather(self, token_slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V at int64 `token_slots` of any shape, each [..., head_dim]."""
        key, value = self._tokens[token_slots].view(self.pages.dtype).to(self.dtype).chunk(2, -1)
        return key, value

    def keys(self, token_slots: torch.Tensor) -> torch.Tensor:
        """As `gather`, of K alone."""
        key = self._tokens.view(len(self._tokens), 2, -1)[:, 0]
        return key[token_slots].view(self.pages.dtype).to(self.dtype)

    def put(self, token_slots: torch.Tensor, content: torch.Tensor) -> None:
        """Write tokens: int64 `token_slots` [n], `content` [n, 2 * head_dim], K then V. Slots are real; none repeats"""
        if content.dtype == self.pages.dtype:  # K and V of a token lie behind one another here and there
            ops.scatter_rows(self._tokens.view(torch.uint8), content.view(torch.uint8), token_slots)
        else:
            key, value = content.unsqueeze(1).chunk(2, -1)
            ops.kv_write(self.pages, key, value, token_slots[:, None])

    def copy_tokens(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy tokens; both lists may overlap, since all are read before any is written."""
        self._tokens[target] = self._tokens[source]

    def copy_pages(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole pages, so many at a time that the copy takes little memory; the lists must not overlap."""
        some = max(COPY_BYTES // (self.pages[0].numel() * self.pages.itemsize), 1)
        for there, here in zip(target.split(some), source.split(some), strict=True):
            self._pages[there] = self._pages[here]
