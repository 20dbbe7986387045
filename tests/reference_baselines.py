"""Rules of baselines that others published; as `tests/reference.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from reference import Budgets, Layer, Rule, uniform_budget


@dataclass(frozen=True)
class Duo(Rule):
    """The `retrieval` share of heads with the largest gates keep all; the others both ends of the prompt.

    gates: [L][H]. Ties go to the earlier head.
    """

    gates: Sequence[Sequence[float]]
    retrieval: float = 0.5
    sinks: int = 128
    recent: int = 256

    @property
    def newest(self) -> int:
        return self.recent

    def budgets(self, layers: int, heads: int, tokens: int) -> Budgets:
        pairs = [(i, h) for i in range(layers) for h in range(heads)]
        best = sorted(pairs, key=lambda p: -self.gates[p[0]][p[1]])[: int(Fraction(str(self.retrieval)) * len(pairs))]
        ends = min(self.sinks + self.recent, tokens)
        return [[tokens if (i, h) in best else ends for h in range(heads)] for i in range(layers)]

    def scores(self, index: int, layer: Layer) -> torch.Tensor:
        """What is not among the newest tokens goes by age."""
        return -torch.arange(layer.keep.shape[1]).float().expand(layer.keep.shape)


@dataclass(frozen=True)
class ExpectedAttention(Rule):
    """Tokens by the attention that a normally distributed query at one of the next positions pays, times their value.

    The distribution is that of the last `window` queries before their rotation, without those of the sinks. Pairs
    (i, i + d/2) are complex numbers here, which a position turns by i-th of `angles` times the position.
    """

    angles: Sequence[float]
    ratio: float = 0.5
    window: int = 512
    sinks: int = 4
    future: int = 512
    layers_share: bool = False

    def budgets(self, layers: int, heads: int, tokens: int) -> Budgets:
        return [[uniform_budget(tokens, self.ratio, None)] * heads for _ in range(layers)]

    def scores(self, index: int, layer: Layer) -> torch.Tensor:
        heads, tokens = layer.keep.shape
        group = layer.queries.shape[0] // heads
        result = torch.full((heads, tokens), torch.inf)
        for head in range(heads if tokens > self.sinks else 0):
            votes = [self._expected(layer, head, query_head) for query_head in range(head * group, (head + 1) * group)]
            norms = layer.values[head, self.sinks :].float().norm(dim=1)
            result[head, self.sinks :] = torch.stack(votes).mean(0).float() * norms
        return result

    def _expected(self, layer: Layer, head: int, query_head: int) -> torch.Tensor:
        """float64 [T - sinks] for one query head."""
        tokens, d = layer.keys.shape[1:]
        position = torch.arange(max(self.sinks, tokens - self.window), tokens)
        q = layer.queries[query_head, position].double()
        plain = torch.complex(q[:, : d // 2], q[:, d // 2 :]) * self._turned(-position)
        after = self._turned(torch.arange(tokens, tokens + self.future)).mean(0)
        samples = torch.cat([(plain * after).real, (plain * after).imag], 1)  # as at the mean of the next positions
        k = layer.keys[head, self.sinks :].double()
        spread = torch.einsum("td,de,te->t", k, torch.cov(samples.T, correction=0), k)
        return (layer.scale * k @ samples.mean(0) + layer.scale**2 * spread / 2).softmax(0)

    def _turned(self, position: torch.Tensor) -> torch.Tensor:
        """complex [n, d/2], of length 1."""
        angle = position[:, None] * torch.tensor(self.angles, dtype=torch.float64)
        return torch.polar(torch.ones_like(angle), angle)
