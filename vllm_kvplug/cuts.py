"""When requests whose heads share a budget are cut, and how much stays: pure functions of lengths."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, Self

Allocation = Literal["joint", "layer", "uniform"]
"""Who shares the budget of a rank's heads: all of them; those of a layer, and layers store the same; or nobody."""

SAFEGUARD = Fraction(1, 5)
"""Of an even share: what a head of a layer that shares keeps whatever the others' scores are, as AdaKV publishes it."""


def own_tokens(safe: int, kept: int, heads: int) -> int:
    """Best tokens that each of `heads` heads keeps whatever the others' scores, where they share `kept`.

    safe: tokens that every head keeps anyway.
    """
    return safe + int(SAFEGUARD * Fraction(kept - safe * heads, heads))


@dataclass(frozen=True)
class DecodeCuts:
    """Eviction while a request decodes: at multiples of `every` tokens, down to `budget` tokens per head on average.

    sinks, recent: first and last tokens that no cut drops.
    """

    every: int
    budget: int
    sinks: int
    recent: int


@dataclass(frozen=True)
class Cuts:
    """When a request whose heads share one budget is cut, and to how many tokens. Made for one length of prompt.

    every: a prompt is cut whenever another multiple of so many tokens is in, and when it is complete; an engine's
    requests all have the same, and the same decode.every: block tables are made for it. window: last
    tokens, at least one, that a cut of the prompt does not judge yet. share: of the tokens it does judge, what the
    heads of a rank keep, all of them together; while the prompt comes in no token is judged twice. decode: how it
    goes on. protect: disjoint ranges that no head drops. allocation: how what the heads keep is divided among them,
    which changes none of the totals. floor: of the tokens a cut of the prompt judges, what every head keeps for itself
    before heads share the rest; at most `share`.
    """

    prefill_end: int
    every: int
    window: int
    share: Fraction
    decode: DecodeCuts | None = None
    protect: tuple[tuple[int, int], ...] = ()
    allocation: Allocation = "joint"
    floor: Fraction = Fraction(0)

    @classmethod
    def of_ratio(
        cls,
        prefill_end: int,
        every: int,
        window: int,
        ratio: float,
        decode: DecodeCuts | None = None,
        allocation: Allocation = "joint",
    ) -> Self:
        """Cuts that leave `ratio` of a prompt, the window counted in: where that does not pay for it, it is smaller."""
        budget = Fraction(str(ratio)) * prefill_end
        window = max(min(window, int(budget)), 1)
        share = max(budget - window, Fraction(0)) / max(prefill_end - window, 1)
        return cls(prefill_end, every, window, min(share, Fraction(1)), decode, allocation=allocation)

    def next(self, n: int) -> int | None:
        """The first cut of a request that has more than n tokens."""
        if n < self.prefill_end:
            return min((n // self.every + 1) * self.every, self.prefill_end)
        return (n // self.decode.every + 1) * self.decode.every if self.decode else None

    def previous(self, n: int) -> int:
        """The last cut of a prompt when it had fewer than n tokens, 0 if there was none."""
        return (n - 1) // self.every * self.every

    def judged(self, cut: int) -> int:
        """How many of the prompt's first tokens the cuts up to this one have judged."""
        return max(cut - self.window, 0)

    def kept(self, cut: int, heads: int) -> int:
        """Tokens that `heads` heads together keep of those that this cut of the prompt judges."""
        judged, safe = self.judged(cut) - self.judged(self.previous(cut)), self.safe(cut)
        return safe * heads + int(self.share * (judged - safe) * heads)

    def stored(self, cut: int, before: int, heads: int) -> int:
        """Tokens that `heads` heads together store after a cut, of `before` that they stored at it."""
        if cut <= self.prefill_end:
            judged = self.judged(cut) - self.judged(self.previous(cut))
            return before - judged * heads + self.kept(cut, heads)
        assert self.decode is not None
        return min(before, max(self.decode.budget, self.safe(cut)) * heads)

    def safe(self, cut: int) -> int:
        """How many of the tokens that a cut judges no head drops; earlier cuts may have dropped some of an answer's."""
        if cut <= self.prefill_end:
            return self._protected(self.judged(self.previous(cut)), self.judged(cut))
        assert self.decode is not None
        ends = min(self.decode.sinks + self.decode.recent, cut)
        return ends + self._protected(self.decode.sinks, cut - self.decode.recent)

    def own(self, cut: int, kept: int, heads: int) -> int:
        """Best tokens that each head keeps whatever the others' scores, where `heads` heads keep `kept` at a cut."""
        safe = self.safe(cut)
        even = own_tokens(safe, kept, heads) - safe if self.allocation == "layer" else 0
        own = max(even, self._least(cut))
        return safe + own if own else 0

    def guaranteed(self) -> int:
        """How many tokens of a complete prompt every head keeps by its floor, beside those that are not judged."""
        total, cut = 0, 0
        while cut < self.prefill_end:
            cut = min((cut // self.every + 1) * self.every, self.prefill_end)
            total += self._least(cut)
        return total

    def _least(self, cut: int) -> int:
        """Of the floor, at one cut."""
        if cut > self.prefill_end:
            return 0
        judged = self.judged(cut) - self.judged(self.previous(cut))
        return int(self.floor * (judged - self.safe(cut)))

    def protects(self, token: int) -> bool:
        return any(start <= token < end for start, end in self.protect)

    def _protected(self, start: int, end: int) -> int:
        return sum(max(min(b, end) - max(a, start), 0) for a, b in self.protect)


@dataclass(frozen=True)
class AdmissionCuts(Cuts):
    """Of a request whose heads store what a gate lets through, behind a local window of `window` tokens.

    What is stored after a cut is an upper bound: of the tokens that have left the window, heads together keep at most
    `share`, or each of them if their allocation is uniform, and at most `budget` each on average if that is given,
    beside those that are protected.
    """

    budget: int | None = None

    def stored(self, cut: int, before: int, heads: int) -> int:
        most = self.capped(cut, heads)
        if self.budget is not None:
            most = min(most, (self._safe(cut) + self.budget) * heads)
        return min(before, min(cut, self.window) * heads + most)

    def capped(self, cut: int, heads: int) -> int:
        """Most tokens that the cap leaves `heads` heads together beside their windows, after a cut."""
        left, safe = max(cut - self.window, 0), self._safe(cut)
        if self.allocation == "uniform":
            return (safe + int(self.share * (left - safe))) * heads
        return safe * heads + int(self.share * (left - safe) * heads)

    def guaranteed(self) -> int:
        """How many tokens of a complete prompt the cap leaves every head, beside its window and protected ones."""
        return self.capped(self.prefill_end, 1) - self._safe(self.prefill_end)

    def stay(self) -> int:
        """How many tokens of a complete prompt are in every head's window, or have left it and are protected."""
        return min(self.prefill_end, self.window) + self._safe(self.prefill_end)

    def _safe(self, cut: int) -> int:
        """How many tokens that have left the window are protected."""
        return self._protected(0, max(cut - self.window, 0))

    @property
    def bounded(self) -> bool:
        """Whether cuts ever drop anything."""
        return self.share < 1 or self.budget is not None
