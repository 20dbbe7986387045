"""Page plans: how many head pages a request of n tokens may hold.

The plan is the contract between the scheduler, which hands out blocks, and the worker, which places
head pages in them. It is a pure function of lengths, so both sides compute it without talking, and it
never promises less than the worker can need. One vLLM block is one head page of every (layer, head) of
a rank, hence `blocks = ceil(pages / heads per rank)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from vllm_kvplug.shape import PAGE, ModelShape


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, 0 if none; what is below one that fits must fit too."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


Kept = Sequence[Sequence[int]]
"""Tokens kept, [layers][kv_heads]."""


class PagePlan:
    """Blocks of a request, before and after its prompt is complete.

    `kept(n)` gives the tokens every head keeps of a prompt of n tokens once it is complete, or None for
    a policy that drops nothing then. `ring_tokens` bounds what a head ever stores (sinks + window).
    A decoding head adds one token a step to what it kept, up to `ring_tokens`.
    """

    def __init__(self, shape: ModelShape, kept: Callable[[int], Kept] | None, ring_tokens: int | None = None):
        self.shape = shape
        self.ring_tokens = ring_tokens
        self.shrinks = kept is not None
        self._kept_of = None if kept is None else lru_cache(maxsize=1024)(kept)
        self._rank_bins = lru_cache(maxsize=1024)(self._count_bins)

    @property
    def heads_per_rank(self) -> int:
        return self.shape.layers * self.shape.rank_kv_heads

    def kept(self, prefill_end: int) -> Kept:
        """Tokens every head holds when a prompt of `prefill_end` tokens is complete, [layers][kv_heads]."""
        if self._kept_of is not None:
            return self._kept_of(prefill_end)
        stored = self._bounded(prefill_end)
        return [[stored] * self.shape.kv_heads] * self.shape.layers

    def prefill_pages(self, n: int) -> int:
        """Head pages of one rank while the prompt is being computed and n tokens of it are in."""
        return self.heads_per_rank * ceil_div(self._bounded(n), PAGE)

    def decode_pages(self, prefill_end: int, n: int) -> int:
        """Head pages of the neediest rank at n >= `prefill_end` tokens, once the prompt is complete."""
        return max(self._pages_of(bins, prefill_end, n) for bins in self._rank_bins(prefill_end))

    def prefill_blocks(self, n: int) -> int:
        return ceil_div(self.prefill_pages(n), self.heads_per_rank)

    def decode_blocks(self, prefill_end: int, n: int) -> int:
        return ceil_div(self.decode_pages(prefill_end, n), self.heads_per_rank)

    def row_entries(self, prefill_end: int, n: int) -> int:
        """Length of the request's block-table row at n tokens, entries given back included.

        Rows only ever grow: the entries that shrinking empties stay in place as null blocks, and blocks
        for new tokens are appended behind them.
        """
        if n <= prefill_end:
            return self.prefill_blocks(n)
        grown = self.decode_blocks(prefill_end, n) - self.decode_blocks(prefill_end, prefill_end)
        return self.prefill_blocks(prefill_end) + grown

    def peak_blocks(self, max_len: int) -> int:
        """Most blocks a request of up to `max_len` tokens holds at once."""
        if not self.shrinks:
            return self.prefill_blocks(max_len)
        return max(self.prefill_blocks(max_len), self.decode_blocks(1, max_len))

    def _bounded(self, n: int) -> int:
        return n if self.ring_tokens is None else min(n, self.ring_tokens)

    def _count_bins(self, prefill_end: int) -> list[tuple[int, list[int]]]:
        """Per rank: full pages, and how many heads have r tokens in their last page (r = 0..15)."""
        kept = self.kept(prefill_end)
        bins = []
        for rank in range(self.shape.tensor_parallel):
            full, partial = 0, [0] * PAGE
            for layer in kept:
                for head in self.shape.rank_heads(rank):
                    full += layer[head] // PAGE
                    partial[layer[head] % PAGE] += 1
            bins.append((full, partial))
        return bins

    def _pages_of(self, bins: tuple[int, list[int]], prefill_end: int, n: int) -> int:
        if self.ring_tokens is not None:  # every head stores the same, up to the ring
            return self.prefill_pages(n)
        full, partial = bins
        new = n - prefill_end
        return full + sum(count * ceil_div(r + new, PAGE) for r, count in enumerate(partial) if count)
