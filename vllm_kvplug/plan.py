"""Page plans: how many head pages a request of n tokens may hold.

The plan is the contract between the scheduler, which hands out blocks, and the worker, which places
head pages in them. It is a pure function of lengths, so both sides compute it without talking, and it
never promises less than the worker can need. One vLLM block is one head page of every (layer, head) of
a rank, hence `blocks = ceil(pages / heads per rank)`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Self

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
        return self.row_entries(prefill_end, n)

    def kept_tokens(self, prefill_end: int) -> int:
        """Tokens that all heads of the model hold when a prompt of `prefill_end` tokens is complete."""
        return sum(map(sum, self.kept(prefill_end)))

    def cuts(self, prefill_end: int, after: int, upto: int) -> list[int]:
        """Lengths in (after, upto] at which the request gives blocks back, ascending."""
        return [prefill_end] if self.shrinks and after < prefill_end <= upto else []

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


@dataclass(frozen=True)
class Cuts:
    """When a prompt whose heads share one budget is cut, and to how many tokens. Made for one length of prompt.

    every: it is cut whenever another multiple of so many tokens is in, and when it is complete. window: last tokens,
    at least one, that a cut does not judge yet. share: of the tokens it does judge, what the heads of a rank keep,
    all of them together; a judged token is never judged again. protect: disjoint ranges that no head drops.
    """

    prefill_end: int
    every: int
    window: int
    share: Fraction
    protect: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of_ratio(cls, prefill_end: int, every: int, window: int, ratio: float) -> Self:
        """Cuts that leave `ratio` of a prompt, the window counted in: where that does not pay for it, it is smaller."""
        budget = Fraction(str(ratio)) * prefill_end
        window = max(min(window, int(budget)), 1)
        share = max(budget - window, Fraction(0)) / max(prefill_end - window, 1)
        return cls(prefill_end, every, window, min(share, Fraction(1)))

    def next(self, n: int) -> int | None:
        """The first cut of a request that has more than n tokens."""
        return min((n // self.every + 1) * self.every, self.prefill_end) if n < self.prefill_end else None

    def previous(self, n: int) -> int:
        """The last cut of a request when it had fewer than n tokens, 0 if there was none."""
        return self.prefill_end if n > self.prefill_end else (n - 1) // self.every * self.every

    def judged(self, cut: int) -> int:
        """How many of the first tokens the cuts up to this one have judged."""
        return max(cut - self.window, 0)

    def kept(self, cut: int, heads: int) -> int:
        """Tokens that `heads` heads together keep of those that this cut judges."""
        start, end = self.judged(self.previous(cut)), self.judged(cut)
        safe = sum(max(min(b, end) - max(a, start), 0) for a, b in self.protect)
        return safe * heads + int(self.share * (end - start - safe) * heads)


@dataclass
class _Timeline:
    """A request's cuts so far as they were asked for: lengths, tokens stored after each, and row entries at each."""

    cuts: list[int] = field(default_factory=lambda: [0])
    stored: list[int] = field(default_factory=lambda: [0])
    entries: list[int] = field(default_factory=lambda: [0])


class SharedPlan:
    """Blocks of a request whose heads share one budget: totals follow from lengths, their distribution from the data.

    However `stored` tokens lie in `heads` heads, they fill at most (stored + 15 * heads) / 16 pages. Every rank has
    the budget of its own heads, so ranks need the same. See `PagePlan` for what the methods have in common.
    """

    def __init__(self, shape: ModelShape, cuts_of: Callable[[int], Cuts]):
        self.shape = shape
        self.cuts_of = lru_cache(maxsize=1024)(cuts_of)
        self._timeline = lru_cache(maxsize=1024)(self._make_timeline)

    @property
    def heads_per_rank(self) -> int:
        return self.shape.layers * self.shape.rank_kv_heads

    def prompt_blocks(self, prefill_end: int) -> int:
        return self.first_blocks(prefill_end, prefill_end)

    def first_blocks(self, prefill_end: int, n: int) -> int:
        cuts = [cut for cut in self._timeline(prefill_end).cuts[1:] if cut < n]
        return max(self._blocks_at(prefill_end, length) for length in [*cuts, n])

    def decode_blocks(self, prefill_end: int, n: int) -> int:
        _, after = self._after(prefill_end, prefill_end)
        return after if n == prefill_end else self._blocks_at(prefill_end, n)

    def row_entries(self, prefill_end: int, n: int) -> int:
        time = self._timeline(prefill_end)
        last = bisect_left(time.cuts, n) - 1  # the cut before n
        if last <= 0:
            return self._blocks_at(prefill_end, n)
        _, after = self._after(prefill_end, time.cuts[last])
        return time.entries[last] + self._blocks_at(prefill_end, n) - after

    def peak_blocks(self, max_len: int) -> int:
        return max(self.prompt_blocks(max_len), self.decode_blocks(1, max_len))

    def kept_tokens(self, prefill_end: int) -> int:
        stored, _ = self._after(prefill_end, prefill_end)
        return stored * self.shape.heads // self.heads_per_rank

    def cuts(self, prefill_end: int, after: int, upto: int) -> list[int]:
        return [cut for cut in self._timeline(prefill_end).cuts[1:] if after < cut <= upto]

    def held(self, prefill_end: int, cut: int) -> tuple[int, int]:
        return self._blocks_at(prefill_end, cut), self._after(prefill_end, cut)[1]

    def _after(self, prefill_end: int, cut: int) -> tuple[int, int]:
        """Tokens of a rank, and blocks, once the request was cut at `cut`."""
        time = self._timeline(prefill_end)
        stored = time.stored[bisect_left(time.cuts, cut)]
        return stored, self._blocks(stored, cut)

    def _blocks_at(self, prefill_end: int, n: int) -> int:
        """Blocks at n tokens, before a cut there."""
        time = self._timeline(prefill_end)
        last = bisect_left(time.cuts, n) - 1
        return self._blocks(time.stored[last] + (n - time.cuts[last]) * self.heads_per_rank, n)

    def _blocks(self, stored: int, n: int) -> int:
        """For `stored` tokens in all heads of a rank, of which none has more than n."""
        heads, dense = self.heads_per_rank, ceil_div(n, PAGE)
        return dense if stored == n * heads else min(dense, ceil_div((stored + (PAGE - 1) * heads) // PAGE, heads))

    def _make_timeline(self, prefill_end: int) -> _Timeline:
        cuts, heads, time = self.cuts_of(prefill_end), self.heads_per_rank, _Timeline()
        judged = 0
        while (cut := cuts.next(time.cuts[-1])) is not None:
            held = self._blocks(time.stored[-1], time.cuts[-1]) if time.cuts[-1] else 0
            before = self._blocks(time.stored[-1] + (cut - time.cuts[-1]) * heads, cut)
            judged += cuts.kept(cut, heads)
            time.cuts.append(cut)
            time.stored.append(judged + (cut - cuts.judged(cut)) * heads)
            time.entries.append(time.entries[-1] + before - held)
        return time


Plan = PagePlan | SharedPlan
