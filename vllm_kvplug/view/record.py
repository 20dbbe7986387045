"""What is known of one request: what heads kept of its prompt, when attention drifted, which blocks it held."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Span = tuple[int, int]
"""Prompt tokens [start, end)."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Cluster(_Frozen):
    """A pivot, its satellites, and the tokens that these fetch together when its attention has drifted."""

    layer: int
    pivot: int
    satellites: tuple[int, ...]
    tokens: int


class Drift(_Frozen):
    """A check that found drift, in decoded tokens: when it was made, and the first token that sees what was fetched.

    clusters: places in the record's `clusters`.
    """

    checked: int
    lands: int
    clusters: tuple[int, ...]


class Step(_Frozen):
    """After a step of the engine: tokens of the request that are in the cache, and blocks in use."""

    tokens: int
    blocks: int


class Pool(_Frozen):
    blocks: int
    block_tokens: int
    block_bytes: int


class Record(_Frozen):
    """One request under a policy; L layers, H KV heads.

    summary: the resolved budget in words. prompt, answer: the text of every token. kept: [L][H], spans of the prompt
    that a head stores when the prompt is complete, ascending. roles: [L][H], of a policy with a head profile.
    checks: drift checks that were concluded, with and without an outcome in `drifts`.
    """

    version: Literal[1] = 1
    model: str
    policy: str
    knobs: dict[str, Any]
    summary: str
    versions: dict[str, str]
    prompt: tuple[str, ...] = Field(min_length=1)
    answer: tuple[str, ...]
    kept: tuple[tuple[tuple[Span, ...], ...], ...] = Field(min_length=1)
    roles: tuple[tuple[str, ...], ...] | None = None
    clusters: tuple[Cluster, ...] = ()
    checks: int = 0
    drifts: tuple[Drift, ...] = ()
    pool: Pool
    steps: tuple[Step, ...]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        heads = len(self.kept[0])
        if any(len(layer) != heads for layer in self.kept):
            raise ValueError("every layer of kept must have the same heads")
        if self.roles is not None and [len(row) for row in self.roles] != [heads] * len(self.kept):
            raise ValueError("roles and kept must have the same layers and heads")
        for spans in (spans for layer in self.kept for spans in layer):
            edges = [0, *(edge for span in spans for edge in span), self.tokens]
            if any(start >= end for start, end in spans) or edges != sorted(edges):
                raise ValueError(f"kept has spans that are not ascending ranges of {self.tokens} prompt tokens")
        if any(not 0 <= place < len(self.clusters) for drift in self.drifts for place in drift.clusters):
            raise ValueError("drifts must be of clusters in the record")
        return self

    @property
    def tokens(self) -> int:
        """Of the prompt."""
        return len(self.prompt)

    @property
    def heads(self) -> int:
        """(layer, KV head) pairs."""
        return len(self.kept) * len(self.kept[0])

    def counts(self) -> list[list[int]]:
        """Prompt tokens that each head keeps, [L][H]."""
        return [[sum(end - start for start, end in spans) for spans in layer] for layer in self.kept]

    def share(self) -> float:
        """Of all heads' prompt tokens, those that were kept."""
        return sum(map(sum, self.counts())) / (self.heads * self.tokens)

    def votes(self) -> list[int]:
        """Heads that keep each token of the prompt."""
        change = [0] * (self.tokens + 1)
        for start, end in (span for layer in self.kept for spans in layer for span in spans):
            change[start] += 1
            change[end] -= 1
        return list(accumulate(change))[:-1]

    @property
    def triggers(self) -> int:
        return sum(len(drift.clusters) for drift in self.drifts)


def spans_of(positions: Iterable[int]) -> tuple[Span, ...]:
    """Ascending positions as ranges."""
    spans: list[Span] = []
    for position in positions:
        if spans and spans[-1][1] == position:
            spans[-1] = spans[-1][0], position + 1
        else:
            spans.append((position, position + 1))
    return tuple(spans)
