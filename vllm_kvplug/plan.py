"""Page plans: how many head pages a request of n tokens may hold.

The plan is the contract between the scheduler, which hands out blocks, and the worker, which places
head pages in them. It is a pure function of lengths, so both sides compute it without talking, and it
never promises less than the worker can need. One vLLM block is one head page of every (layer, head) of
a rank, hence `blocks = ceil(pages / heads per rank)`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from vllm_kvplug.cuts import Cuts
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
    """Blocks of a request whose heads have budgets of their own, before and after its prompt is complete.

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

    def prompt_blocks(self, prefill_end: int) -> int:
        """Most blocks that a request holds while its prompt is computed."""
        return self.prefill_blocks(prefill_end)

    def first_blocks(self, prefill_end: int, n: int) -> int:
        """Most blocks that a request holds until n tokens are in."""
        most = self.prefill_blocks(min(n, prefill_end))
        return most if n <= prefill_end else max(most, self.decode_blocks(prefill_end, n))

    def kept_tokens(self, prefill_end: int) -> int:
        """Tokens that all heads of the model hold when a prompt of `prefill_end` tokens is complete."""
        return sum(map(sum, self.kept(prefill_end)))

    def cuts(self, prefill_end: int, after: int, upto: int) -> list[int]:
        """Lengths in (after, upto] at which the request gives blocks back, ascending."""
        return [prefill_end] if self.shrinks and after < prefill_end <= upto else []

    def next_cut(self, prefill_end: int, n: int) -> int | None:
        """The first cut of a request that has more than n tokens."""
        return prefill_end if self.shrinks and n < prefill_end else None

    def held(self, prefill_end: int, cut: int) -> tuple[int, int]:
        """Blocks that the request holds before and after it is cut at `cut` tokens.

        What it gives back are the last entries of the row that it has at that length.
        """
        return self.prefill_blocks(cut), self.decode_blocks(prefill_end, cut)

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

    def most_entries(self, max_len: int) -> int:
        """Room for the row of any request of up to `max_len` tokens: prompt and answer each round up once more."""
        return ceil_div(max_len, PAGE) + 2

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


class LayerPlan(PagePlan):
    """Blocks of a request whose heads share, layer by layer, what `kept` gives those of a rank together.

    Who keeps how much is up to the data. However n tokens lie in H heads, they fill at most (n + 15 * H) / 16 pages.
    """

    def __init__(self, shape: ModelShape, kept: Callable[[int], Kept]):
        super().__init__(shape, kept)
        self._rank_totals = lru_cache(maxsize=1024)(self._sum_layers)

    def decode_pages(self, prefill_end: int, n: int) -> int:
        heads = self.shape.rank_kv_heads
        dense, more = heads * ceil_div(n, PAGE), (n - prefill_end + PAGE - 1) * heads
        return max(
            sum(min((total + more) // PAGE, dense) for total in totals) for totals in self._rank_totals(prefill_end)
        )

    def _sum_layers(self, prefill_end: int) -> list[list[int]]:
        """Tokens that the heads of a rank keep together, by rank and layer."""
        ranks = (self.shape.rank_heads(rank) for rank in range(self.shape.tensor_parallel))
        return [[sum(layer[head] for head in heads) for layer in self.kept(prefill_end)] for heads in ranks]


@dataclass
class _Timeline:
    """A request's cuts as far as they were asked for: lengths, tokens stored after each, and row entries at each."""

    cuts: list[int] = field(default_factory=lambda: [0])
    stored: list[int] = field(default_factory=lambda: [0])
    entries: list[int] = field(default_factory=lambda: [0])


class SharedPlan:
    """Blocks of a request whose heads share one budget: totals follow from lengths, their distribution from the data.

    However `stored` tokens lie in `heads` heads, they fill at most (stored + 15 * heads) / 16 pages. Every rank has
    the budget of its own heads, so ranks need the same. See `PagePlan` for what the methods have in common.
    """

    shrinks = True

    def __init__(self, shape: ModelShape, cuts_of: Callable[[int], Cuts]):
        self.shape = shape
        self.cuts_of = lru_cache(maxsize=1024)(cuts_of)
        self._timelines = lru_cache(maxsize=1024)(lambda prefill_end: _Timeline())

    @property
    def heads_per_rank(self) -> int:
        return self.shape.layers * self.shape.rank_kv_heads

    def prompt_blocks(self, prefill_end: int) -> int:
        return self.first_blocks(prefill_end, prefill_end)

    def first_blocks(self, prefill_end: int, n: int) -> int:
        return max(self._blocks_at(prefill_end, length) for length in {*self.cuts(prefill_end, 0, n), n})

    def decode_blocks(self, prefill_end: int, n: int) -> int:
        """Blocks at n >= `prefill_end` tokens; at a cut, after it."""
        cut = n == prefill_end or n in self.cuts(prefill_end, n - 1, n)
        return self.held(prefill_end, n)[1] if cut else self._blocks_at(prefill_end, n)

    def row_entries(self, prefill_end: int, n: int) -> int:
        time = self._timeline(prefill_end, n)
        last = bisect_left(time.cuts, n) - 1  # the cut before n
        held = self.held(prefill_end, time.cuts[last])[1] if last else 0
        return time.entries[last] + self._blocks_at(prefill_end, n) - held

    def most_entries(self, max_len: int) -> int:
        """As of other plans. Rows grow again after every cut, and round up there if cuts do not lie at full pages."""
        cuts = self.cuts_of(max_len)
        steps = (cuts.every, cuts.decode.every if cuts.decode else PAGE)
        return ceil_div(max_len, PAGE) + 2 + sum(max_len // step for step in steps if step % PAGE)

    def peak_blocks(self, max_len: int) -> int:
        """As of other plans, if longer prompts keep no fewer tokens: the longest, the shortest, or one that ends where
        the most tokens of an answer come before the first cut. One more for what rounding adds to others.
        """
        ends = {1, max_len}
        decode = self.cuts_of(max_len).decode
        if decode:
            last = max_len // decode.every * decode.every
            ends |= {max(last, 1), max(last - decode.every, 1)}
        return min(max(self.first_blocks(end, max_len) for end in ends) + 1, ceil_div(max_len, PAGE))

    def kept_tokens(self, prefill_end: int) -> int:
        return self.stored(prefill_end, prefill_end) * self.shape.heads // self.heads_per_rank

    def cuts(self, prefill_end: int, after: int, upto: int) -> list[int]:
        cuts = self._timeline(prefill_end, upto).cuts
        return cuts[bisect_right(cuts, after) : bisect_right(cuts, upto)]

    def next_cut(self, prefill_end: int, n: int) -> int | None:
        return self.cuts_of(prefill_end).next(n)

    def stored(self, prefill_end: int, cut: int) -> int:
        """Tokens of a rank once the request was cut at `cut`."""
        time = self._timeline(prefill_end, cut)
        return time.stored[bisect_left(time.cuts, cut)]

    def held(self, prefill_end: int, cut: int) -> tuple[int, int]:
        return self._blocks_at(prefill_end, cut), self._blocks(self.stored(prefill_end, cut), cut)

    def stored_at(self, prefill_end: int, n: int) -> int:
        """Tokens of a rank at n tokens, before a cut there."""
        time = self._timeline(prefill_end, n)
        last = bisect_left(time.cuts, n) - 1
        return time.stored[last] + (n - time.cuts[last]) * self.heads_per_rank

    def _blocks_at(self, prefill_end: int, n: int) -> int:
        return self._blocks(self.stored_at(prefill_end, n), n)

    def _blocks(self, stored: int, n: int) -> int:
        """For `stored` tokens in all heads of a rank, of which none has more than n."""
        heads, dense = self.heads_per_rank, ceil_div(n, PAGE)
        return dense if stored == n * heads else min(dense, ceil_div((stored + (PAGE - 1) * heads) // PAGE, heads))

    def _timeline(self, prefill_end: int, n: int) -> _Timeline:
        """The request's cuts up to n tokens, if not further."""
        time, cuts, heads = self._timelines(prefill_end), self.cuts_of(prefill_end), self.heads_per_rank
        while (cut := cuts.next(time.cuts[-1])) is not None and cut <= n:
            last, stored = time.cuts[-1], time.stored[-1]
            before = stored + (cut - last) * heads
            grown = self._blocks(before, cut) - (self._blocks(stored, last) if last else 0)
            time.cuts.append(cut)
            time.stored.append(cuts.stored(cut, before, heads))
            time.entries.append(time.entries[-1] + grown)
        return time


Plan = PagePlan | SharedPlan
