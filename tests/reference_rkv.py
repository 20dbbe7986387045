"""R-KV as a rule of the reference (2505.24133): slow, and written from its description."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from reference import Layer, Positions, Rule, Watcher


@dataclass(frozen=True)
class RKV(Rule):
    """Every 128 tokens each head goes down to `budget`: the last 8 tokens, protected ones, the best of the others."""

    budget: int = 1024
    importance: float = 0.1
    protect: tuple[tuple[int, int], ...] = ()
    context_end: int | None = None

    def watch(self, layers: list[Layer], tokens: int) -> Watcher:
        return Eviction(self, layers)


class Eviction(Watcher):
    """Holds a decoding request to its budget. kept: after each cut, by the request's length."""

    def __init__(self, rule: RKV, layers: list[Layer]):
        self.rule, self.layers = rule, layers
        self.queries = [layer.queries for layer in layers]  # [Hq, n, d]
        self.kept: dict[int, Positions] = {}

    def after(self, length: int) -> None:
        self.queries = [
            torch.cat([old, layer.queries], 1)[:, -8:] for old, layer in zip(self.queries, self.layers, strict=True)
        ]
        if length % 128:
            return
        for layer, queries in zip(self.layers, self.queries, strict=True):
            group = len(queries) // len(layer.keep)
            for head in range(len(layer.keep)):
                stored = layer.keep[head].nonzero().flatten().tolist()
                safe = [t for t in stored if t >= length - 8 or any(a <= t < b for a, b in self.rule.protect)]
                most = max(self.rule.budget, len(safe))
                if len(stored) > most:
                    own = queries[head * group : (head + 1) * group]
                    scores = self.scores(own, layer.keys[head, stored], layer.scale)
                    order = sorted(range(len(stored)), key=lambda i: (stored[i] not in safe, -float(scores[i]), i))
                    layer.keep[head] = False
                    layer.keep[head, [stored[i] for i in order[:most]]] = True
        self.kept[length] = [[row.nonzero().flatten().tolist() for row in layer.keep] for layer in self.layers]

    def scores(self, queries: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
        """queries [G, 8, d], keys [n, d] -> [n], of which the last 8 mean nothing."""
        n = len(keys)
        older = keys[:-8]
        logits = torch.stack([q.float() @ older.float().T * scale for q in queries]).max(0).values  # [8, n - 8]
        attention = logits.softmax(-1).mean(0)
        pooled = torch.stack([attention[max(i - 3, 0) : i + 4].max() for i in range(len(older))])

        unit = keys / keys.pow(2).sum(-1, keepdim=True).sqrt()
        cosine = unit @ unit.T
        for i in range(n):
            cosine[i, i] = 0
            alike = [j for j in range(n) if cosine[i, j] > 0.5]
            if alike:
                cosine[i, max(alike)] = 0
        redundant = cosine.mean(0).softmax(-1)
        result = -(1 - self.rule.importance) * redundant
        result[:-8] += self.rule.importance * pooled
        return result
