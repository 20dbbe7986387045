"""What a policy says that selects tokens anew in every decode step, and the page plan of its requests.

Such a request holds its prompt densely while it is computed. Then its heads keep what they always attend to, room for
the tokens that they select, and landmarks, in whole blocks of their own. Integers, shared by scheduler and worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache

import torch

from vllm_kvplug.config import share_of
from vllm_kvplug.cuts import AdmissionCuts, Cuts
from vllm_kvplug.plan import Kept, PagePlan, SharedPlan, ceil_div
from vllm_kvplug.shape import PAGE, ModelShape
from vllm_kvplug.tiers.codecs import CodecName

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Selection:
    """Every decode query attends to the prompt tokens that landmarks find best, beside those that always stay.

    landmarks: their format (components/landmarks.py). codec: of K and V on the host. share: of a prompt's tokens that a
    head selects; least, most: bounds of that number, None for no bound; unit: it is a multiple of this. local: last
    tokens of the prompt, which always stay and have no landmarks.
    """

    landmarks: str
    codec: CodecName
    share: float
    least: int
    most: int | None
    unit: int
    local: int

    def tokens(self, prompt_len: int) -> int:
        """Tokens that each head selects of a prompt, if so many can be selected."""
        wanted = max(share_of(self.share, prompt_len), self.least, 1)
        wanted = wanted if self.most is None else min(wanted, self.most)
        return ceil_div(wanted, self.unit) * self.unit


@dataclass(frozen=True)
class Layout:
    """What each head of a request stores once its prompt is complete: first what stays, then what is selected.

    stays: disjoint ranges of the tokens that every query attends to, ascending; the last `local` ones end them.
    selected: how many tokens are selected. landmarks: so many of the prompt's first tokens have one, or of those that
    its cuts have left to the host. token_blocks, landmark_blocks: the blocks that both take, in this order. ahead: so
    many more tokens stay, which have no landmarks. Where heads have unlike numbers of landmarks, and so of selected
    tokens, these are the most that any may have.
    """

    stays: Ranges
    selected: int
    landmarks: int
    token_blocks: int
    landmark_blocks: int
    ahead: int = 0

    @property
    def stay(self) -> int:
        """How many tokens stay."""
        return self.ahead + sum(end - start for start, end in self.stays)

    @property
    def excluded(self) -> int:
        """How many of those have landmarks all the same, which never selects them."""
        return sum(max(min(end, self.landmarks) - start, 0) for start, end in self.stays)

    @property
    def kept(self) -> int:
        return self.stay + self.selected


class SelectionPlan(PagePlan):
    """Blocks of a request that selects. Where that would save no block, the prompt is kept whole.

    stays: of a prompt's length, the ranges that always stay. tokens_per_page: whose landmarks fit in a head page.
    """

    def __init__(self, shape: ModelShape, selection: Selection, stays: Callable[[int], Ranges], tokens_per_page: int):
        super().__init__(shape, self._kept)
        self.selection, self.tokens_per_page = selection, tokens_per_page
        self._stays = stays
        self.layout = lru_cache(maxsize=1024)(self._layout)

    def _layout(self, prefill_end: int) -> Layout | None:
        """How a prompt of so many tokens is kept; None: whole."""
        stays = self._stays(prefill_end)
        stay = sum(end - start for start, end in stays)
        selected = min(self.selection.tokens(prefill_end), prefill_end - stay)
        landmarks = max(prefill_end - self.selection.local, 0)
        tokens, pages = ceil_div(stay + selected, PAGE), ceil_div(landmarks, self.tokens_per_page)
        if tokens + pages >= ceil_div(prefill_end, PAGE):
            return None
        return Layout(stays, selected, landmarks, tokens, pages)

    def _kept(self, prefill_end: int) -> Kept:
        layout = self.layout(prefill_end)
        return [[layout.kept if layout else prefill_end] * self.shape.kv_heads] * self.shape.layers

    def decode_pages(self, prefill_end: int, n: int) -> int:
        layout = self.layout(prefill_end)
        landmarks = layout.landmark_blocks if layout else 0
        return super().decode_pages(prefill_end, n) + landmarks * self.heads_per_rank

    def next_cut(self, prefill_end: int, n: int) -> int | None:
        """Behind a context that is selected from, a chunk is one token: each query selects its own."""
        return n + 1 if n >= prefill_end and self.layout(prefill_end) else super().next_cut(prefill_end, n)


class HostedPlan(SharedPlan):
    """Blocks of a request whose heads share a budget while its prompt comes in, and that selects from a part of it.

    When the prompt is complete, every head gives its lowest-scored tokens to the host, as many as its floor has kept
    for it (`Cuts.floor`): the same number for all heads, so that landmarks and what is selected are rectangles, while
    what stays is as ragged as a shared budget makes it. Where that would save no block, all of it stays.

    selected: of a prompt's length, the tokens that a head selects, if so many are on the host. tokens_per_page: whose
    landmarks fit in a head page.
    """

    def __init__(
        self, shape: ModelShape, cuts_of: Callable[[int], Cuts], selected: Callable[[int], int], tokens_per_page: int
    ):
        super().__init__(shape, cuts_of)
        self.tokens_per_page, self._selected = tokens_per_page, selected
        self.layout = lru_cache(maxsize=1024)(self._layout)

    def _layout(self, prefill_end: int) -> Layout | None:
        """How a complete prompt of so many tokens lies, selected tokens first; None: nothing goes to the host."""
        hosted, survivors = self.cuts_of(prefill_end).guaranteed(), self.stored(prefill_end, prefill_end)
        selected = min(self._selected(prefill_end), hosted)
        tokens = self._blocks(survivors - (hosted - selected) * self.heads_per_rank, prefill_end)
        landmarks = ceil_div(hosted, self.tokens_per_page)
        if tokens + landmarks >= self._blocks(survivors, prefill_end):
            return None
        return Layout((), selected, hosted, tokens, landmarks)

    def stored_at(self, prefill_end: int, n: int) -> int:
        layout = self.layout(prefill_end) if n > prefill_end else None
        gone = (layout.landmarks - layout.selected) * self.heads_per_rank if layout else 0
        return super().stored_at(prefill_end, n) - gone

    def held(self, prefill_end: int, cut: int) -> tuple[int, int]:
        before, after = super().held(prefill_end, cut)
        layout = self.layout(prefill_end) if cut == prefill_end else None
        return before, layout.token_blocks + layout.landmark_blocks if layout else after

    def kept_tokens(self, prefill_end: int) -> int:
        """Of which the selected ones change."""
        layout = self.layout(prefill_end)
        gone = (layout.landmarks - layout.selected) * self.shape.heads if layout else 0
        return super().kept_tokens(prefill_end) - gone

    def next_cut(self, prefill_end: int, n: int) -> int | None:
        """As of `SelectionPlan`."""
        return n + 1 if n >= prefill_end and self.layout(prefill_end) else super().next_cut(prefill_end, n)

    def _blocks_at(self, prefill_end: int, n: int) -> int:
        layout = self.layout(prefill_end) if n > prefill_end else None
        return super()._blocks_at(prefill_end, n) + (layout.landmark_blocks if layout else 0)


@dataclass(frozen=True)
class Chosen:
    """How many tokens a head selects of those that it has on the host: a `share`, within the bounds `least` and `most`.

    The device computes it too, in integers of 64 bits: the share is taken in millionths.
    """

    share: float
    least: int
    most: int | None

    @cached_property
    def _ratio(self) -> tuple[int, int]:
        return Fraction(str(self.share)).limit_denominator(1_000_000).as_integer_ratio()

    def of(self, hosted: int) -> int:
        (part, whole), most = self._ratio, hosted if self.most is None else self.most
        return min(max(hosted * part // whole, self.least), most, hosted)

    def of_heads(self, hosted: torch.Tensor) -> torch.Tensor:
        """As `of`, of every head: int64."""
        part, whole = self._ratio
        return torch.minimum((hosted * part // whole).clamp(self.least, self.most), hosted)


class AdmittedPlan(HostedPlan):
    """Blocks of a request whose heads store what a gate admits, and whose admitted tokens go to the host.

    That is when the prompt is complete, and its window stays, and so does what is protected. How many tokens a head has
    admitted is known to the device alone, up to its cap (`AdmissionCuts`), for which landmarks and host slots are
    counted.
    """

    def __init__(
        self, shape: ModelShape, cuts_of: Callable[[int], AdmissionCuts], chosen: Chosen, tokens_per_page: int
    ):
        super().__init__(shape, cuts_of, lambda n: chosen.of(cuts_of(n).guaranteed()), tokens_per_page)
        self.chosen = chosen

    def _layout(self, prefill_end: int) -> Layout | None:
        layout, cuts = super()._layout(prefill_end), self.cuts_of(prefill_end)
        assert isinstance(cuts, AdmissionCuts)
        return layout and replace(layout, ahead=cuts.stay())
