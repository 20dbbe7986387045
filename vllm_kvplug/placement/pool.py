"""The head pages of an engine's KV cache, seen as one array."""

from __future__ import annotations

import torch

from vllm_kvplug.shape import PAGE

COPY_BYTES = 64 << 20
"""Most that is read before it is written when pages move."""


class PagePool:
    """All head pages, [pages, 16, 2 * head_dim]: K in the first half of the last dimension, V in the second.

    A view of vLLM's own KV allocation in layout BLHNC, where a block is layers * KV heads contiguous pages.
    """

    def __init__(self, pages: torch.Tensor):
        self.pages = pages
        self._tokens = pages.view(-1, pages.shape[-1])

    @classmethod
    def over(cls, layer_cache: torch.Tensor, layers: int) -> PagePool:
        """The pool that a layer's cache [blocks, KV heads, 16, 2 * head_dim] is a strided view of."""
        blocks, heads, tokens, content = layer_cache.shape
        if tokens != PAGE or layer_cache.stride(0) != layers * heads * tokens * content:
            raise RuntimeError(f"KV cache is not in layout BLHNC: {layer_cache.shape}, {layer_cache.stride()}")
        storage = layer_cache.untyped_storage()
        flat = torch.empty(0, dtype=layer_cache.dtype, device=layer_cache.device)
        shape = (blocks * layers * heads, tokens, content)
        return cls(flat.set_(storage, 0, shape, (tokens * content, content, 1)))

    def gather(self, token_slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V at int64 `token_slots` of any shape, each [..., head_dim]."""
        key, value = self._tokens[token_slots].chunk(2, -1)
        return key, value

    def put(self, token_slots: torch.Tensor, content: torch.Tensor) -> None:
        """Write tokens: int64 `token_slots` [n], `content` [n, 2 * head_dim], K then V."""
        self._tokens[token_slots] = content

    def copy_tokens(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy tokens; both lists may overlap, since all are read before any is written."""
        self._tokens[target] = self._tokens[source]

    def copy_pages(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole pages, so many at a time that the copy takes little memory; the lists must not overlap."""
        some = max(COPY_BYTES // (self.pages[0].numel() * self.pages.itemsize), 1)
        for there, here in zip(target.split(some), source.split(some), strict=True):
            self.pages[there] = self.pages[here]
