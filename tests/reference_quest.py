"""Quest's selection of pages, page by page (2406.10774): decode queries see the best pages of what heads store."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from reference import Layer, Rule, Watcher, uniform_budget
from reference_gated import WGKV, Capped

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
        tokens = range(layer.keys.shape[1])
        return best_pages(layer, head, [list(tokens[page * PAGE : (page + 1) * PAGE]) for page in range(pages)], count)


def best_pages(layer: Layer, head: int, pages: list[list[int]], count: int) -> list[int]:
    """The `count` pages, each a list of tokens, whose bounds promise the last query most; the newest is one of them."""
    group = len(layer.queries) // len(layer.keys)
    queries = layer.queries[head * group : (head + 1) * group, -1]
    scores = []
    for page in pages[:-1]:
        keys = layer.keys[head, page]
        low, high = keys.min(0).values, keys.max(0).values
        scores.append(max(float(torch.maximum(q * low, q * high).sum()) for q in queries))
    best = sorted(range(len(scores)), key=lambda page: (-scores[page], page))[: count - 1]
    return sorted([*best, len(pages) - 1])


class Everything(Watcher):
    """What the last step did not want is there again."""

    def __init__(self, layers: list[Layer]):
        self.layers = layers

    def before(self, length: int) -> None:
        for layer in self.layers:
            layer.keep[:] = True


@dataclass(frozen=True)
class WGKVQuest(WGKV):
    """As WGKV; behind the prompt queries see the window, and of older tokens that a head stores the best pages.

    Pages are 16 such tokens each, in order of position. budget_tokens: what queries see, window included.
    watched: layers of the latest request behind its prompt. stored: what heads of each of them store, bool [H, T].
    """

    budget_tokens: int = 2048
    watched: list[Layer] = field(default_factory=list, init=False)
    stored: dict[int, torch.Tensor] = field(default_factory=dict, init=False)

    def watch(self, layers: list[Layer], tokens: int) -> Watcher:
        self.watched[:] = layers
        return StoredAndSeen(self, layers)

    def lets_through(self, layer: Layer, query_pos: torch.Tensor, key_pos: torch.Tensor) -> torch.Tensor:
        seen = super().lets_through(layer, query_pos, key_pos)
        index = next((i for i, one in enumerate(self.watched) if one is layer), None)
        if index is None:
            return seen
        self.stored[index] = layer.keep & seen[:, 0]
        old, count = max(len(key_pos) - self.window, 0), -(-self.budget_tokens // PAGE) - self.window // PAGE
        for head, stored in enumerate(self.stored[index]):
            tokens = stored[:old].nonzero().flatten().tolist()
            pages = [tokens[i : i + PAGE] for i in range(0, len(tokens), PAGE)]
            chosen = best_pages(layer, head, pages, count) if pages else []
            hidden = [t for number, page in enumerate(pages) if number not in chosen for t in page]
            seen[head, :, hidden] = False
        return seen


class StoredAndSeen(Capped):
    """What a query did not want is there again for the next one, and for cuts."""

    def after(self, length: int) -> None:
        for index, layer in enumerate(self.layers):
            layer.keep[:] = self.rule.stored[index]
        super().after(length)
