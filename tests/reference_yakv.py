"""YAKV's selection, as slow and plain as the rest of the reference: keys are decoded and multiplied, token by token.

Nothing leaves the reference: behind a complete prompt its tokens that do not always stay get the K and V that the host
would give back, and the mask of every decode step says which of them a query wants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import reference_higgs
import torch
from reference import Layer, Positions, Rule, Watcher, masked_softmax

from vllm_kvplug.quant.grids import load_grid

CPU = torch.device("cpu")
TIE = 1e-4
"""Weights this close, relative to the larger, may be ranked either way by two ways of computing them."""

NEAR = 1.01, 1e-4
"""An engine's K or V on the host may err so many times as much as ours, and by so much of their size more: a value in
the middle of two codes may get either."""

SHAKE = 1e-5
"""Noise of keys, relative to their mean size, that is more than two ways of computing them differ by."""


@dataclass
class Selecting(Rule):
    """angles: of the model's rotary positions. engine: what an engine's heads held, by the request's length: where its
    choice differs from ours in tokens whose weights tie, it is taken. host: what its host gives back of the prompt, by
    layer: K before RoPE and V, each [H, tokens, d]. unit: tokens that share a landmark."""

    angles: Sequence[float]
    ratio: float = 0.03125
    min_tokens: int = 16
    max_tokens: int | None = None
    sinks: int = 0
    local: int = 64
    codec: str = "higgs4"
    landmarks: str = "higgs2"
    protect: tuple[tuple[int, int], ...] = ()
    context_end: int | None = None
    engine: Mapping[int, Positions] = field(default_factory=dict)
    host: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    itemsize: int = 4

    def __post_init__(self) -> None:
        self.watcher: Selection | None = None

    def watch(self, layers: list[Layer], tokens: int) -> Watcher:
        self.watcher = Selection(self, layers) if self.selects(layers[0]) else None
        return self.watcher or Watcher()

    def lets_through(self, layer: Layer, query_pos: torch.Tensor, key_pos: torch.Tensor) -> torch.Tensor:
        seen = super().lets_through(layer, query_pos, key_pos)
        index = next((i for i, one in enumerate(self.watcher.layers) if one is layer), None) if self.watcher else None
        return seen if index is None else seen & self.watcher.wanted(index, len(key_pos))[:, None]

    @property
    def unit(self) -> int:
        return 8 if self.landmarks == "means8" else 1

    def stays(self, tokens: int) -> list[int]:
        always = [*range(self.sinks), *range(tokens - self.local, tokens)]
        always += [t for start, end in self.protect for t in range(start, end)]
        return sorted({t for t in always if 0 <= t < tokens})

    def count(self, tokens: int) -> int:
        wanted = max(int(self.ratio * tokens), self.min_tokens)
        wanted = wanted if self.max_tokens is None else min(wanted, self.max_tokens)
        return min(-(-wanted // self.unit) * self.unit, tokens - len(self.stays(tokens)))

    def selects(self, layer: Layer) -> bool:
        """Whether that takes fewer blocks than the prompt: of tokens that are kept, and of landmarks."""
        tokens, dim = layer.keys.shape[1:]
        eight = {"higgs2": 8 * (dim // 4 + 2), "residual": dim // 2 + 2 + 8 * (dim // 8 + 2), "means8": 2 * dim}
        page = 16 * 2 * dim * self.itemsize // eight[self.landmarks] * 8
        blocks = -(-(len(self.stays(tokens)) + self.count(tokens)) // 16) + -(-(tokens - self.local) // page)
        return tokens > self.local and blocks < -(-tokens // 16)


class Selection(Watcher):
    """landmarks: of each layer float32 [H, n, d], what remains of the keys of the first n prompt tokens.

    swaps: how many tokens of an engine's choice were taken in place of ours. all: how many were chosen in all.
    strange: (layer, K or V, head, position) of what an engine's host gives back and should not. margins: by length,
    layer and head, by how much of the larger the weights differ of tokens that an engine should not have swapped.
    """

    def __init__(self, rule: Selecting, layers: list[Layer]):
        self.rule, self.layers = rule, layers
        self.tokens = layers[0].keys.shape[1]
        self.stays = rule.stays(self.tokens)
        self.open = [t for t in range(self.tokens - rule.local) if t not in set(self.stays)]
        self.swaps = self.all = 0
        self.strange: list[tuple[int, ...]] = []
        self.margins: dict[tuple[int, ...], float] = {}
        keys = [layer.keys[:, : self.tokens - rule.local] for layer in layers]
        self.landmarks = [self._landmarks(of_layer) for of_layer in keys]
        self.shaky = [shaky(of_layer, self._landmarks) for of_layer in keys]
        for index in range(len(layers)):
            self._through_the_host(index)

    def before(self, length: int) -> None:
        """Whatever the last step did not want is there again."""
        for layer in self.layers:
            layer.keep[:] = True

    def wanted(self, index: int, length: int) -> torch.Tensor:
        """What the newest queries of a layer attend to, bool [H, length]."""
        layer, landmarks = self.layers[index], self.landmarks[index]
        group, result = len(layer.queries) // len(landmarks), []
        for head, keys in enumerate(landmarks):
            every = torch.ones(1, len(keys), dtype=torch.bool)
            queries = layer.queries[head * group : (head + 1) * group, -1]
            weights = torch.stack([masked_softmax(q[None], keys, every, layer.scale)[0] for q in queries]).max(0).values
            best = sorted(self.open, key=lambda t: (-float(weights[t]), t))[: self.rule.count(self.tokens)]
            mask = torch.ones(length, dtype=torch.bool)
            mask[self.open] = False
            mask[self._up_to_ties(set(best), weights, index, head, length)] = True
            result.append(mask)
        return torch.stack(result)

    def _up_to_ties(self, best: set[int], weights: torch.Tensor, layer: int, head: int, length: int) -> list[int]:
        self.all += len(best)
        stored = self.rule.engine.get(length)
        if stored is None:
            return sorted(best)
        theirs = {t for t in stored[layer][head] if t < self.tokens} - set(self.stays)
        chosen = up_to_ties(best, theirs, weights, self.shaky[layer][head])
        if chosen != theirs:
            self.margins[length, layer, head] = spread(weights[sorted(best ^ theirs)])
        self.swaps += len(chosen ^ best) // 2
        return sorted(chosen)

    def _landmarks(self, keys: torch.Tensor) -> torch.Tensor:
        """keys [H, n, d]."""
        if self.rule.landmarks == "higgs2":
            return rounded(keys, 2)
        means = torch.cat([keys, keys[:, -1:].expand(-1, -keys.shape[1] % 8, -1)], 1).unflatten(1, (-1, 8)).mean(2)
        coarse = means.half().float() if self.rule.landmarks == "means8" else rounded(means, 4)
        each = torch.stack([coarse[:, t // 8] for t in range(keys.shape[1])], 1)
        return each if self.rule.landmarks == "means8" else each + rounded(keys - each, 1)

    def _through_the_host(self, index: int) -> None:
        layer, position = self.layers[index], torch.arange(self.tokens)[self.open]
        keys = turned(layer.keys[:, self.open], position, self.rule.angles, -1)
        values = layer.values[:, self.open]
        theirs = [held[:, self.open] for held in self.rule.host[index]] if self.rule.host else None
        (keys, values), strange = hosted([keys, values], self.rule.codec, theirs)
        self.strange += [(index, which, head, self.open[i]) for which, head, i in strange]
        layer.keys[:, self.open] = turned(keys, position, self.rule.angles, 1)
        layer.values[:, self.open] = values


def hosted(
    exact: list[torch.Tensor], codec: str, theirs: Sequence[torch.Tensor] | None
) -> tuple[list[torch.Tensor], list[list[int]]]:
    """K and V [H, n, d] as the host gives them back: an engine's if those err no more than ours.

    Also which of the engine's err more: (0 for K or 1 for V, head, token).
    """
    ours = [rounded(x, 4) for x in exact] if codec == "higgs4" else exact
    if theirs is None:
        return ours, []
    taken, strange = [], []
    for which, (own, other, x) in enumerate(zip(ours, theirs, exact, strict=True)):
        error = [(found - x).norm(dim=-1) for found in (own, other)]
        near = error[1] <= NEAR[0] * error[0] + NEAR[1] * x.norm(dim=-1)
        taken.append(torch.where(near[..., None], other, own) if codec == "higgs4" else own)
        strange += [[which, *place] for place in (~near).nonzero().tolist()]
    return taken, strange


def up_to_ties(best: set[int], theirs: set[int], weights: torch.Tensor, shaky: torch.Tensor) -> set[int]:
    """`theirs` if it differs from `best` only in tokens whose weights tie or whose landmarks are shaky, else `best`."""
    swapped = sorted(theirs ^ best)
    firm = [t for t in swapped if not shaky[t]]
    tie = len(firm) <= len(swapped) // 2 or spread(weights[firm]) <= TIE
    return theirs if swapped and len(theirs) == len(best) and tie else best


def spread(weights: torch.Tensor) -> float:
    """Of weights that are not negative, relative to the largest."""
    return float((weights.max() - weights.min()) / weights.max().clamp_min(1e-38))


def shaky(keys: torch.Tensor, landmarks: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Tokens whose landmarks a little noise changes: another way of computing keys may do so too. bool [H, n]."""
    noise = torch.Generator().manual_seed(0)
    others = [keys + SHAKE * keys.abs().mean() * torch.randn(keys.shape, generator=noise) for _ in range(4)]
    differ = [(landmarks(other) - landmarks(keys)).norm(dim=-1) for other in others]
    return torch.stack(differ).amax(0) > 100 * SHAKE * keys.norm(dim=-1)


def rounded(x: torch.Tensor, bits: Any) -> torch.Tensor:
    """x [H, n, d] as HIGGS gives it back, float32."""
    grid, dim = load_grid(bits, CPU), x.shape[-1]
    codes, scale = reference_higgs.encode(x.flatten(0, 1), grid, dim)
    return reference_higgs.decode(codes, scale, grid, dim).float().view(x.shape)


def turned(x: torch.Tensor, position: torch.Tensor, angles: Sequence[float], way: int) -> torch.Tensor:
    """x [..., n, d] turned by RoPE at positions [n] (way 1), or back (way -1)."""
    angle = way * position[:, None] * torch.tensor(angles)
    pairs = torch.complex(*x.float().chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([pairs.real, pairs.imag], -1)
