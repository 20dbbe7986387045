"""Fast KVzip's gate with a host tier behind it (`fastkvzip+yakv`): kept, hosted or dropped, and what queries select.

As the rest of the reference: slow, token by token, and nothing leaves it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from reference import Layer, Positions, Watcher, masked_softmax
from reference_gated import FastKVzip
from reference_yakv import hosted as through_the_host
from reference_yakv import rounded, shaky, spread, up_to_ties


@dataclass(frozen=True)
class Hosted(FastKVzip):
    """Of what a cut judges, every head keeps a share of `offload` for itself, and heads share one of `ratio`.

    When the prompt is complete, the lowest scores of what each head has kept go to the host, as many as it kept for
    itself. engine: what an engine's heads held, by the request's length: where its choice differs from ours in tokens
    whose weights tie, it is taken. host: what its host gives back, by layer: K and V, each [H, n, d] of the n tokens of
    every head there. watchers: of the replays, in order.
    """

    offload: float = 0.3
    fetch: float = 0.03125
    min_tokens: int = 16
    codec: str = "higgs4"
    itemsize: int = 4
    protect: tuple[tuple[int, int], ...] = ()
    context_end: int | None = None
    engine: Mapping[int, Positions] = field(default_factory=dict)
    host: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    watchers: list[Selection] = field(default_factory=list)

    def hosted_share(self, tokens: int) -> Fraction:
        """Of the tokens before the window, what each head keeps for itself; both shares are no more than all."""
        window, share = super().limits(tokens)
        wanted = Fraction(str(self.offload)) * tokens / max(tokens - window, 1)
        return min(wanted, 1 - share)

    def limits(self, tokens: int) -> tuple[int, Fraction]:
        window, share = super().limits(tokens)
        return window, share + self.hosted_share(tokens)

    def own(self, share: Fraction, free: int, tokens: int) -> int:
        return int(self.hosted_share(tokens) * free)

    def free(self, start: int, stop: int) -> list[int]:
        return [t for t in range(start, stop) if not any(a <= t < b for a, b in self.protect)]

    def hosted(self, tokens: int) -> int:
        """How many tokens of a complete prompt each head has on the host, if that saves blocks."""
        window, before, total = self.limits(tokens)[0], 0, 0
        for cut in self.cuts(tokens):
            judged = self.free(max(before - window, 0), max(cut - window, 0))
            total, before = total + int(self.hosted_share(tokens) * len(judged)), cut
        return total

    def selected(self, tokens: int) -> int:
        return min(max(int(Fraction(str(self.fetch)) * tokens), self.min_tokens), self.hosted(tokens))

    def saves(self, layers: list[Layer]) -> bool:
        """Whether pages of landmarks, and of what heads keep and select, are in fewer blocks than what survived."""
        tokens, dim = layers[0].keys.shape[1:]
        heads = len(layers) * len(layers[0].keep) // self.ranks
        survivors = sum(int(layer.keep.sum()) for layer in layers) // self.ranks

        def blocks(stored: int) -> int:
            """However they lie in heads."""
            dense = -(-tokens // 16)
            return dense if stored == tokens * heads else min(dense, -(-((stored + 15 * heads) // 16) // heads))

        page = 16 * 2 * dim * self.itemsize // (8 * (dim // 4 + 2)) * 8
        hosted = self.hosted(tokens)
        stay = survivors - (hosted - self.selected(tokens)) * heads
        return blocks(stay) - (-hosted // page) < blocks(survivors)

    def watch(self, layers: list[Layer], tokens: int) -> Watcher:
        self.watchers.clear()
        if not self.saves(layers):
            return Watcher()
        self.watchers.append(Selection(self, layers))
        return self.watchers[0]

    def lets_through(self, layer: Layer, query_pos: torch.Tensor, key_pos: torch.Tensor) -> torch.Tensor:
        seen = super().lets_through(layer, query_pos, key_pos)
        for watcher in self.watchers:
            for index, one in enumerate(watcher.layers):
                if one is layer:
                    return seen & watcher.wanted(index, len(key_pos))[:, None]
        return seen


class Selection(Watcher):
    """hosted: positions [L][H] of what is on the host. landmarks: [L][H], float32 [n, d], what remains of its keys.

    swaps: how many tokens of an engine's choice were taken in place of ours. strange, margins: as of `reference_yakv`.
    """

    def __init__(self, rule: Hosted, layers: list[Layer]):
        self.rule, self.layers = rule, layers
        self.tokens = layers[0].keys.shape[1]
        self.count, self.swaps = rule.selected(self.tokens), 0
        judged = rule.free(0, max(self.tokens - rule.limits(self.tokens)[0], 0))
        self.hosted: Positions = []
        self.landmarks: list[list[torch.Tensor]] = []
        self.shaky: list[list[torch.Tensor]] = []
        self.strange: list[tuple[int, ...]] = []
        self.margins: dict[tuple[int, ...], float] = {}
        for index, layer in enumerate(layers):
            of_layer = []
            for kept, gate in zip(layer.keep, layer.gate, strict=True):
                ranked = sorted([t for t in judged if kept[t]], key=lambda t, gate=gate: (-float(gate[t]), t))
                of_layer.append(sorted(ranked[len(ranked) - rule.hosted(self.tokens) :]))
            keys = [layer.keys[head, hosted][None] for head, hosted in enumerate(of_layer)]
            self.hosted.append(of_layer)
            self.landmarks.append([rounded(one, 2)[0] for one in keys])
            self.shaky.append([shaky(one, lambda k: rounded(k, 2))[0] for one in keys])
            place = torch.arange(len(of_layer))[:, None], torch.tensor(of_layer)
            exact = [held[place] for held in (layer.keys, layer.values)]
            back, strange = through_the_host(exact, rule.codec, rule.host[index] if rule.host else None)
            layer.keys[place], layer.values[place] = back
            self.strange += [(index, which, head, of_layer[head][i]) for which, head, i in strange]

    def before(self, length: int) -> None:
        """Whatever the last step did not want is on the host still; what was dropped is not."""
        for layer, of_layer in zip(self.layers, self.hosted, strict=True):
            for head, hosted in enumerate(of_layer):
                layer.keep[head, hosted] = True

    def wanted(self, index: int, length: int) -> torch.Tensor:
        """What the newest queries of a layer attend to, of what heads keep or have on the host: bool [H, length]."""
        layer, result = self.layers[index], []
        group = len(layer.queries) // len(layer.keep)
        for head, (hosted, keys) in enumerate(zip(self.hosted[index], self.landmarks[index], strict=True)):
            every = torch.ones(1, len(keys), dtype=torch.bool)
            queries = layer.queries[head * group : (head + 1) * group, -1]
            weights = torch.stack([masked_softmax(q[None], keys, every, layer.scale)[0] for q in queries]).max(0).values
            best = set(sorted(range(len(hosted)), key=lambda i, w=weights: (-float(w[i]), i))[: self.count])
            stored = self.rule.engine.get(length)
            if stored is not None:
                theirs = {i for i, t in enumerate(hosted) if t in stored[index][head]}
                chosen = up_to_ties(best, theirs, weights, self.shaky[index][head])
                if chosen != theirs:
                    self.margins[length, index, head] = spread(weights[sorted(best ^ theirs)])
                self.swaps, best = self.swaps + len(chosen ^ best) // 2, chosen
            mask = torch.ones(length, dtype=torch.bool)
            mask[[t for i, t in enumerate(hosted) if i not in best]] = False
            result.append(mask)
        return torch.stack(result)
