"""Quest's selection of pages, page by page (2406.10774): nothing is dropped, decode queries see the best pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from reference import Layer, Rule, Watcher, uniform_budget

PAGE = 16


@dataclass
class Quest(Rule):
    """chosen: by (length, layer), the pages of each head, of the latest request."""

    ratio: float | None = None
    budget_tokens: int | None = None
    dense_layers: int = 2

    def __post_init__(self) -> None:
        self.layers: list[Layer] = []
        self.chosen: dict[tuple[int, int], list[list[int]]] = {}

    def watch(self, layers: list[Layer], tokens: int) -> Watcher:
        self.layers, self.chosen = layers, {}
        return Everything(layers)

    def lets_through(self, layer: Layer, query_pos: torch.Tensor, key_pos: torch.Tensor) -> torch.Tensor:
        seen = super().lets_through(layer, query_pos, key_pos)
        index = next((i for i, one in enumerate(self.layers) if one is layer), None)
        if index is None or index < self.dense_layers:
            return seen
        tokens = len(key_pos)
        pages = -(-tokens // PAGE)
        count = min(max(-(-uniform_budget(tokens, self.ratio, self.budget_tokens) // PAGE), 3), pages)
        heads = [self._best(layer, head, pages, count) for head in range(len(layer.keys))]
        self.chosen[tokens, index] = heads
        mask = torch.zeros(len(heads), tokens, dtype=torch.bool)
        for head, chosen in enumerate(heads):
            for page in chosen:
                mask[head, page * PAGE : (page + 1) * PAGE] = True
        return seen & mask[:, None]

    def _best(self, layer: Layer, head: int, pages: int, count: int) -> list[int]:
        group = len(layer.queries) // len(layer.keys)
        queries = layer.queries[head * group : (head + 1) * group, -1]
        scores = []
        for page in range(pages - 1):
            keys = layer.keys[head, page * PAGE : (page + 1) * PAGE]
            low, high = keys.min(0).values, keys.max(0).values
            scores.append(max(float(torch.maximum(q * low, q * high).sum()) for q in queries))
        best = sorted(range(pages - 1), key=lambda page: (-scores[page], page))[: count - 1]
        return sorted([*best, pages - 1])  # the newest page is always there


class Everything(Watcher):
    """What the last step did not want is there again."""

    def __init__(self, layers: list[Layer]):
        self.layers = layers

    def before(self, length: int) -> None:
        for layer in self.layers:
            layer.keep[:] = True
