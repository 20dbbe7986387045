"""A gate with a host tier behind it: kept, hosted or dropped, and what queries select (`fastkvzip+yakv`, `wgkv+yakv`).

As the rest of the reference: slow, token by token, and nothing leaves it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from reference import Layer, Positions, Watcher, masked_softmax
from reference_gated import WGKV, FastKVzip
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
        heads = len(layers) * len(layers[0].keep) // self.ranks
        survivors = sum(int(layer.keep.sum()) for layer in layers) // self.ranks
        return saves(self, layers[0], heads, survivors, self.hosted(len(layers[0].keep[0])))

    def count(self, hosted: int) -> int:
        """How many of its tokens on the host a head selects; all heads have so many."""
        return self.selected(self.watchers[0].tokens)

    def watch(self, layers: list[Layer], tokens: int) -> Watcher:
        self.watchers.clear()
        if not self.saves(layers):
            return Watcher()
        self.watchers.append(Selection(self, layers, [self.lowest(layer) for layer in layers]))
        return self.watchers[0]

    def lowest(self, layer: Layer) -> list[list[int]]:
        """What goes to the host, of each head."""
        tokens, result = layer.keep.shape[1], []
        judged = self.free(0, max(tokens - self.limits(tokens)[0], 0))
        for kept, gate in zip(layer.keep, layer.gate, strict=True):
            ranked = sorted([t for t in judged if kept[t]], key=lambda t, gate=gate: (-float(gate[t]), t))
            result.append(sorted(ranked[len(ranked) - self.hosted(tokens) :]))
        return result

    def lets_through(self, layer: Layer, query_pos: torch.Tensor, key_pos: torch.Tensor) -> torch.Tensor:
        return super().lets_through(layer, query_pos, key_pos) & seen_of_the_host(self, layer, len(key_pos))


@dataclass(frozen=True)
class WGKVYakv(WGKV):
    """As WGKV, each head with a cap of its own, for the prompt alone.

    When the prompt is complete, what heads have admitted of it goes to the host, but for the window and protected
    tokens. Each head selects a share of what it has there. engine, host, watchers: as of `Hosted`.
    """

    ratio: float = 0.125
    min_tokens: int = 16
    max_tokens: int | None = None
    codec: str = "higgs4"
    itemsize: int = 4
    engine: Mapping[int, Positions] = field(default_factory=dict)
    host: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    watchers: list[Selection] = field(default_factory=list)

    def free(self, tokens: int) -> list[int]:
        """What has left the window and is not protected."""
        old = range(max(tokens - self.window, 0))
        return [t for t in old if t >= self.sinks and not any(a <= t < b for a, b in self.protect)]

    def cut(self, layers: list[Layer], before: int, length: int, tokens: int) -> None:
        free = self.free(length)
        most = int(Fraction(str(self.cap)) * len(free))
        for layer in layers:
            for kept, gate in zip(layer.keep, layer.gate, strict=True):
                best = sorted([t for t in free if kept[t]], key=lambda t, gate=gate: (-float(gate[t]), t))
                kept[best[most:]] = False

    def count(self, hosted: int) -> int:
        wanted = max(int(Fraction(str(self.ratio)) * hosted), self.min_tokens)
        return min(wanted, hosted if self.max_tokens is None else min(self.max_tokens, hosted))

    def watch(self, layers: list[Layer], tokens: int) -> Watcher:
        """Pages are planned for what the cap allows."""
        self.watchers.clear()
        heads, free = len(layers) * len(layers[0].keep) // self.ranks, self.free(tokens)
        most = int(Fraction(str(self.cap)) * len(free))
        if not saves(self, layers[0], heads, (tokens - len(free) + most) * heads, most):
            return Watcher()
        hosted = [[[t for t in free if kept[t]] for kept in layer.keep] for layer in layers]
        self.watchers.append(Selection(self, layers, hosted))
        return self.watchers[0]

    def lets_through(self, layer: Layer, query_pos: torch.Tensor, key_pos: torch.Tensor) -> torch.Tensor:
        return super().lets_through(layer, query_pos, key_pos) & seen_of_the_host(self, layer, len(key_pos))


def saves(rule: Hosted | WGKVYakv, layer: Layer, heads: int, survivors: int, hosted: int) -> bool:
    """Whether a rank's heads gain blocks by having so many of their survivors on the host, each of them the same."""
    tokens, dim = layer.keys.shape[1:]

    def blocks(stored: int) -> int:
        """However they lie in heads."""
        dense = -(-tokens // 16)
        return dense if stored == tokens * heads else min(dense, -(-((stored + 15 * heads) // 16) // heads))

    selected = rule.selected(tokens) if isinstance(rule, Hosted) else rule.count(hosted)
    page = 16 * 2 * dim * rule.itemsize // (8 * (dim // 4 + 2)) * 8
    return blocks(survivors - (hosted - selected) * heads) - (-hosted // page) < blocks(survivors)


def seen_of_the_host(rule: Hosted | WGKVYakv, layer: Layer, length: int) -> torch.Tensor:
    """bool [H, 1, length]: False for what is on the host and not wanted by the newest queries of a layer."""
    for watcher in rule.watchers:
        for index, one in enumerate(watcher.layers):
            if one is layer:
                return watcher.wanted(index, length)[:, None]
    return torch.ones(1, 1, length, dtype=torch.bool)


class Selection(Watcher):
    """hosted: positions [L][H] of what is on the host. landmarks: [L][H], float32 [n, d], what remains of its keys.

    swaps: how many tokens of an engine's choice were taken in place of ours. strange, margins: as of `reference_yakv`.
    """

    def __init__(self, rule: Hosted | WGKVYakv, layers: list[Layer], hosted: Positions):
        self.rule, self.layers, self.hosted = rule, layers, hosted
        self.tokens, self.swaps = layers[0].keys.shape[1], 0
        self.landmarks: list[list[torch.Tensor]] = []
        self.shaky: list[list[torch.Tensor]] = []
        self.strange: list[tuple[int, ...]] = []
        self.margins: dict[tuple[int, ...], float] = {}
        for layer, of_layer in zip(layers, hosted, strict=True):
            keys = [layer.keys[head, tokens][None] for head, tokens in enumerate(of_layer)]
            self.landmarks.append([rounded(one, 2)[0] for one in keys])
            self.shaky.append([shaky(one, lambda k: rounded(k, 2))[0] for one in keys])
        for index, of_layer in enumerate(hosted):
            for head in range(len(of_layer)):
                self._through_the_host(index, head)

    def _through_the_host(self, index: int, head: int) -> None:
        layer, tokens = self.layers[index], self.hosted[index][head]
        exact = [held[head, tokens][None] for held in (layer.keys, layer.values)]
        theirs = [held[head, : len(tokens)][None] for held in self.rule.host[index]] if self.rule.host else None
        (key, value), strange = through_the_host(exact, self.rule.codec, theirs)
        layer.keys[head, tokens], layer.values[head, tokens] = key[0], value[0]
        self.strange += [(index, which, head, tokens[i]) for which, _, i in strange]

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
            count = self.rule.count(len(hosted))
            best = set(sorted(range(len(hosted)), key=lambda i, w=weights: (-float(w[i]), i))[:count])
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
