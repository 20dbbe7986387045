"""HeteroCache's retrieval on drift, as slow and plain as the rest of the reference.

The host tier holds what `reference.State` never deletes: a fetch only flips a satellite's mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

import torch
from reference import Budgets, HeteroCache, Layer, Positions, Watcher, average_pool, masked_softmax, pick, protected

TIE = 1e-5
"""Scores this close, relative to the larger, may be ranked either way by two ways of computing them."""


@dataclass(frozen=True)
class HeteroCacheDrift(HeteroCache):
    """HeteroCache whose pivots watch for drift and whose satellites fetch.

    threshold: on the median overlap of `drift_window` queries. land_after: steps from a trigger to the first that
    sees its tokens. step_tokens: fetched tokens that fit a step, which postpones a landing; None: any number.
    released: the released code's budgets (no floor but one token, nothing redistributed), its mix-up of the
    baselines of several pivots in a layer, and its satellites that get the earliest positions, not the best.
    engine: what an engine's heads stored, by the request's length. Where a fetch of the engine differs from ours in
    tokens whose scores tie, its choice is taken, so that the steps after it can still be compared.
    """

    threshold: float = 0.5
    land_after: int = 1
    drift_window: int = 5
    step_tokens: int | None = None
    released: bool = False
    protect: tuple[tuple[int, int], ...] = ()
    context_end: int | None = None
    engine: Mapping[int, Positions] = field(default_factory=dict)

    def budgets(self, layers: int, heads: int, tokens: int) -> Budgets:
        result = super().budgets(layers, heads, tokens)
        if self.released:
            base = self.base(layers * heads, tokens)
            for i, row in enumerate(self.profile["weights"]):
                for h, weight in enumerate(row):
                    if weight >= 0:
                        result[i][h] = min(max(int(base * weight), 1), tokens)
        least = len(protected(self.protect, tokens))
        return [[max(budget, least) for budget in row] for row in result]

    def base(self, pairs: int, tokens: int) -> int:
        """L_base: tokens that a compressed head keeps on average."""
        full = sum(weight < 0 for row in self.profile["weights"] for weight in row)
        total = int(round(self.rho * pairs * tokens, 6)) - full * tokens
        return min(max(total // (pairs - full), 1), tokens)

    def watch(self, layers: list[Layer], tokens: int) -> Drift:
        return Drift(self, layers, tokens)


@dataclass
class Group:
    """A pivot and its satellites. base: the tokens it attended to when its satellites last fetched."""

    layer: int
    pivot: int
    satellites: list[int]
    base: set[int] = field(default_factory=set)
    window: list[torch.Tensor] = field(default_factory=list)
    due: int | None = None
    scores: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    fetched: dict[int, list[int]] = field(default_factory=dict)


class Drift(Watcher):
    """given: tokens before decoding begins, if there are any behind the prompt. A window of queries ends there.

    triggers: (length, layer, pivot) of each, in order. shares: the median of every check.
    """

    def __init__(self, rule: HeteroCacheDrift, layers: list[Layer], given: int):
        self.rule, self.layers, self.given = rule, layers, given
        self.heads, self.tokens = layers[0].keep.shape
        self.count = rule.base(len(layers) * self.heads, self.tokens)
        self.budgets = rule.budgets(len(layers), self.heads, self.tokens)
        self.triggers: list[tuple[int, int, int]] = []
        self.shares: list[float] = []
        self.groups = []
        for index, clusters in enumerate(rule.profile["clusters"]):
            order = [int(pivot) for pivot in clusters]
            groups = [Group(index, pivot, list(clusters[key])) for pivot, key in zip(order, clusters, strict=True)]
            for group, pivot in zip(groups, sorted(order) if rule.released else order, strict=True):
                group.base = set(self._top(self._scores(index, pivot, self._queries(index, pivot)), self.count))
            self.groups += groups

    def before(self, length: int) -> None:
        for group in self.groups:
            if group.due is not None and group.due <= length:
                keep = self.layers[group.layer].keep
                for head, positions in group.fetched.items():
                    keep[head, : self.tokens] = False
                    keep[head, self._up_to_ties(group, head, positions, length)] = True
                group.due = None

    def _up_to_ties(self, group: Group, head: int, positions: list[int], length: int) -> list[int]:
        stored = self.rule.engine.get(length)
        if stored is None:
            return positions
        theirs = [t for t in stored[group.layer][head] if t < self.tokens]
        swapped = group.scores[sorted(set(theirs) ^ set(positions))]
        tie = len(theirs) == len(positions) and (
            not len(swapped) or float(swapped.max() - swapped.min()) <= TIE * float(swapped.max())
        )
        return theirs if tie else positions

    def after(self, length: int) -> None:
        for group in self.groups:
            group.window.append(self._queries(group.layer, group.pivot))
            group.window = group.window[-self.rule.drift_window :]
        full = length - self.tokens >= self.rule.drift_window
        if not full or length < self.given or (length - self.given) % self.rule.drift_window:
            return
        triggered = [g for g in self.groups if g.due is None and self._drifted(g)]
        size = sum(self.budgets[g.layer][h] for g in triggered for h in self._cut(g))
        steps = 0 if self.rule.step_tokens is None else -(-size // self.rule.step_tokens)
        for group in triggered:
            self.triggers.append((length, group.layer, group.pivot))
            group.scores = self._scores(group.layer, group.pivot, group.window[-1])
            group.base = set(self._top(group.scores, self.count))
            group.fetched = {head: self._fetch(group, head) for head in self._cut(group)}
            group.due = length + max(self.rule.land_after, steps)

    def _cut(self, group: Group) -> list[int]:
        return [h for h in group.satellites if self.budgets[group.layer][h] < self.tokens]

    def _drifted(self, group: Group) -> bool:
        tops = [self._top(self._scores(group.layer, group.pivot, q), self.count) for q in group.window]
        self.shares.append(median(len(group.base & set(top)) / self.count for top in tops))
        return self.shares[-1] < self.rule.threshold

    def _fetch(self, group: Group, head: int) -> list[int]:
        budget = self.budgets[group.layer][head]
        if self.rule.released:
            most = max(self.budgets[group.layer][h] for h in self._cut(group))
            safe = protected(self.rule.protect, self.tokens)
            best = [t for t in pick(group.scores, most, 0, self.rule.protect) if t not in safe]
            return sorted(safe + best[: budget - len(safe)])
        return pick(group.scores, budget, 0, self.rule.protect)

    def _queries(self, layer: int, pivot: int) -> torch.Tensor:
        """The newest query of every query head of a pivot's group, [G, d]."""
        group = self.layers[layer].queries.shape[0] // self.heads
        return self.layers[layer].queries[pivot * group : (pivot + 1) * group, -1]

    def _scores(self, layer: int, pivot: int, queries: torch.Tensor) -> torch.Tensor:
        """[T]: attention to the prompt alone, pooled, the strongest of the group."""
        keys = self.layers[layer].keys[pivot, : self.tokens]
        every = torch.ones(1, self.tokens, dtype=torch.bool)
        attention = [masked_softmax(q[None], keys, every, self.layers[layer].scale)[0] for q in queries]
        return torch.stack([average_pool(a, self.rule.kernel) for a in attention]).max(0).values

    @staticmethod
    def _top(scores: torch.Tensor, count: int) -> list[int]:
        return pick(scores, count, 0)
