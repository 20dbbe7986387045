"""Rules with a gate that scores every token once, when it comes in: shared budgets, eviction, admission.

As `tests/reference.py`: slow, and written from the descriptions of the policies.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch
from reference import Layer, Positions, Rule, Watcher

Head = tuple[int, int]  # layer and KV head
Token = tuple[int, int, int]  # position, layer and KV head


def sharing(allocation: str, heads: list[Head]) -> list[list[Head]]:
    """The heads of a rank in groups that share a budget: all, those of each layer, or each alone."""
    of = {"joint": lambda head: 0, "layer": lambda head: head[0], "uniform": lambda head: head}[allocation]
    return [[head for head in heads if of(head) == group] for group in sorted({of(head) for head in heads})]


def deal(tokens: int, stored: list[int]) -> list[int]:
    """How many of `tokens` each group gets: one by one, to the group that stores least, of equals the earlier."""
    got = [0] * len(stored)
    for _ in range(tokens):
        got[min(range(len(stored)), key=lambda group: (stored[group] + got[group], group))] += 1
    return got


def choose(ranked: list[Token], count: int, own: int) -> set[Token]:
    """The first `count` of a group's tokens, given best first; but before all others each head's first `own`."""
    by_head: dict[Head, list[Token]] = {}
    for one in ranked:
        by_head.setdefault(one[1:], []).append(one)
    chosen = {one for tokens in by_head.values() for one in tokens[:own]}
    assert len(chosen) <= count
    return chosen | set([one for one in ranked if one not in chosen][: count - len(chosen)])


@dataclass(frozen=True)
class Knorm(Rule):
    """Heads of a rank share a budget. Tokens are judged once, when they have left a window; short keys stay.

    allocation: who shares: all heads ("joint"), those of each layer, where each first keeps its own best tokens up to a
    fifth of an even share ("layer"), or nobody ("uniform"). Groups store the same number of tokens; where it does not
    divide, earlier ones store one more.
    """

    ratio: float = 0.5
    window: int = 64
    every: int = 2048
    ranks: int = 1
    allocation: str = "joint"

    def gate(self, index: int, key: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return -key.float().pow(2).sum(-1).sqrt()

    def limits(self, tokens: int) -> tuple[int, Fraction]:
        """The window, and the share of what lies before it that is kept, of a prompt of `tokens`."""
        wanted = Fraction(str(self.ratio)) * tokens
        window = max(1, min(self.window, int(wanted)))
        rest = tokens - window
        return window, max(Fraction(0), (wanted - window) / rest) if rest else Fraction(0)

    def own(self, share: Fraction, free: int, tokens: int) -> int:
        """How many of `free` tokens that a cut judges each head keeps before heads share the rest."""
        return int(share * free / 5) if self.allocation == "layer" else 0

    def cuts(self, tokens: int) -> list[int]:
        return sorted({*range(self.every, tokens, self.every), tokens})

    def cut(self, layers: list[Layer], before: int, length: int, tokens: int) -> None:
        window, share = self.limits(tokens)
        heads = layers[0].keep.shape[0]
        judged = range(max(before - window, 0), max(length - window, 0))
        safe = {t for start, end in self.protect for t in range(start, end)}
        free = [t for t in judged if t not in safe]
        own = self.own(share, len(free), tokens)
        for rank in range(self.ranks):
            mine = [(i, h) for i in range(len(layers)) for h in range(heads) if h * self.ranks // heads == rank]
            groups = sharing(self.allocation, mine)
            earlier = [sum(int(layers[i].keep[h, : judged.start].sum()) for i, h in group) for group in groups]
            counts = deal(int(share * len(free) * len(mine)), earlier)
            for group, count in zip(groups, counts, strict=True):
                tokens = [(t, i, h) for t in free for i, h in group]
                best = sorted(tokens, key=lambda one: -float(layers[one[1]].gate[one[2], one[0]]))  # ties: as listed
                for t, i, h in set(tokens) - choose(best, count, own):
                    layers[i].keep[h, t] = False


@dataclass(frozen=True)
class FastKVzip(Knorm):
    """As Knorm, with a sink-attention gate on hidden states (Fast KVzip, section 3.2).

    weights: of the gate, by name. projection [L, H, (G+1)*E, D]: a head's G queries, then its key; q_bias [L, H, G, E];
    norm_q, norm_k [L, E]; sinks [L, H, S, E]; bias [L, H, G]. window_share: of prompts shorter than `every`.
    """

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    window_share: float = 0.02
    decode_budget: int | None = None

    def watch(self, layers: list[Layer], tokens: int) -> Watcher:
        return Watcher() if self.decode_budget is None else DecodeEviction(self, layers)

    def limits(self, tokens: int) -> tuple[int, Fraction]:
        short = int(Fraction(str(self.window_share)) * tokens)
        window = min(self.window, short) if tokens < self.every else self.window
        return Knorm(self.ratio, window, self.every).limits(tokens)

    def gate(self, index: int, key: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        w = {name: weight[index].float() for name, weight in self.weights.items()}
        group, dim = w["q_bias"].shape[1:]

        def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight

        scores = []
        for head in range(len(w["projection"])):
            parts = (hidden.float() @ w["projection"][head].T).split(dim, -1)  # G queries, then the key
            own = norm(parts[group], w["norm_k"])
            shares = []
            for g in range(group):
                query = norm(parts[g] + w["q_bias"][head, g], w["norm_q"])
                itself = ((query * own).sum(-1) / dim**0.5 + w["bias"][head, g]).exp()
                sinks = (query @ w["sinks"][head].T / dim**0.5).exp().sum(-1)
                shares.append(itself / (itself + sinks))
            scores.append(torch.stack(shares).mean(0))
        return torch.stack(scores)


class DecodeEviction(Watcher):
    """Every 128 tokens the lowest scores go, whosever they are, until heads store `decode_budget` on average.

    The first 4 tokens, the last 128 and protected ones are not looked at.
    """

    def __init__(self, rule: FastKVzip, layers: list[Layer]):
        self.rule, self.layers = rule, layers
        self.kept: dict[int, Positions] = {}  # after each cut, by the request's length

    def after(self, length: int) -> None:
        if length % 128:
            return
        self.cut(length)
        self.kept[length] = [[row.nonzero().flatten().tolist() for row in layer.keep] for layer in self.layers]

    def cut(self, length: int) -> None:
        heads = self.layers[0].keep.shape[0]
        safe = {t for start, end in self.rule.protect for t in range(start, end)}
        safe |= {*range(4), *range(length - 128, length)}
        least = len(safe & set(range(length)))
        even = max(self.rule.decode_budget, least)
        own = least + (even - least) // 5 if self.rule.allocation == "layer" else 0

        def rank_of(one: Token) -> tuple[bool, float]:  # of equals the earlier token comes first, then the earlier head
            return one[0] not in safe, -float(self.layers[one[1]].gate[one[2], one[0]])

        for rank in range(self.rule.ranks):
            mine = [h for h in range(heads) if h * self.rule.ranks // heads == rank]
            for group in sharing(self.rule.allocation, [(i, h) for i in range(len(self.layers)) for h in mine]):
                stored = [(t, i, h) for t in range(length) for i, h in group if self.layers[i].keep[h, t]]
                if len(stored) > even * len(group):
                    for t, i, h in set(stored) - choose(sorted(stored, key=rank_of), even * len(group), own):
                        self.layers[i].keep[h, t] = False


@dataclass(frozen=True)
class Oracle(Knorm):
    """As Knorm, cut once, by scores that are known beforehand; what lies behind these is kept.

    known: float32 [L, H, T], for a prompt of T tokens or, where it is computed again, of more. share: of the prompt,
    for the window.
    """

    known: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    share: float = 0.02
    protect: tuple[tuple[int, int], ...] = ()
    context_end: int | None = None

    def limits(self, tokens: int) -> tuple[int, Fraction]:
        return Knorm(self.ratio, int(Fraction(str(self.share)) * tokens), self.every).limits(tokens)

    def cuts(self, tokens: int) -> list[int]:
        return [tokens]

    def cut(self, layers: list[Layer], before: int, length: int, tokens: int) -> None:
        scored = self.known.shape[2]
        for layer, known in zip(layers, self.known, strict=True):
            layer.gate[:, :scored] = known
        safe = (*self.protect, (scored, tokens))
        Knorm.cut(replace(self, protect=safe), layers, before, length, tokens)


@dataclass(frozen=True)
class WGKV(Rule):
    """Heads see a local window, and of what lies before it the tokens that a gate scored above tau (WG-KV, section 3).

    weights: of the gate, by name: norm_pre, norm_rope [L, d]; w1 [L, H, m, 2d]; b1 [L, H, m]; w2 [L, H, m]; b2 [L, H].
    key_weights: the model's, [L] x [H * d, D]: keys before RoPE are taken from there. cap: the share of what lies
    before the window, protected tokens aside, that heads may keep together; they are held to it every `every` tokens
    of a prompt, at its end, and every 128 tokens of an answer.
    """

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    key_weights: list[torch.Tensor] = field(default_factory=list)
    window: int = 256
    tau: float = 0.1
    sinks: int = 0
    cap: float = 1.0
    every: int = 2048
    ranks: int = 1
    protect: tuple[tuple[int, int], ...] = ()

    def lets_through(self, layer: Layer, query_pos: torch.Tensor, key_pos: torch.Tensor) -> torch.Tensor:
        distance = query_pos[:, None] - key_pos
        admitted = (layer.gate > self.tau) | (key_pos < self.sinks) | self.safe(key_pos)
        return (distance >= 0) & ((distance < self.window) | admitted[:, None])

    def safe(self, position: torch.Tensor) -> torch.Tensor:
        found = torch.zeros_like(position, dtype=torch.bool)
        for start, end in self.protect:
            found |= (position >= start) & (position < end)
        return found

    def gate(self, index: int, key: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        w = {name: weight[index] for name, weight in self.weights.items()}
        heads, _, dim = key.shape
        before = (hidden @ self.key_weights[index].T).view(-1, heads, dim).transpose(0, 1)

        def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight

        scores = []
        for head in range(heads):
            x = torch.cat([norm(before[head], w["norm_pre"]), norm(key[head], w["norm_rope"])], 1)
            inner = x @ w["w1"][head].T + w["b1"][head]
            inner = 0.5 * inner * (1 + torch.erf(inner / 2**0.5))
            scores.append(1 / (1 + (-(inner @ w["w2"][head] + w["b2"][head])).exp()))
        return torch.stack(scores)

    def cuts(self, tokens: int) -> list[int]:
        return sorted({*range(self.every, tokens, self.every), tokens})

    def cut(self, layers: list[Layer], before: int, length: int, tokens: int) -> None:
        """Drop the lowest scores of what was admitted, if it is more than the cap allows."""
        old, heads = range(max(length - self.window, 0)), layers[0].keep.shape[0]
        for rank in range(self.ranks):
            pairs = [(i, h) for i in range(len(layers)) for h in range(heads) if h * self.ranks // heads == rank]
            admitted = [(t, i, h) for t in old for i, h in pairs if layers[i].keep[h, t]]
            safe = {t for t in old if t < self.sinks or any(start <= t < end for start, end in self.protect)}
            most = len(safe) * len(pairs) + int(Fraction(str(self.cap)) * (len(old) - len(safe)) * len(pairs))

            def order(one: tuple[int, int, int], safe=safe) -> float:
                return -9.0 if one[0] in safe else -float(layers[one[1]].gate[one[2], one[0]])

            best = sorted(admitted, key=order)
            for t, i, h in best[most:]:
                layers[i].keep[h, t] = False

    def watch(self, layers: list[Layer], tokens: int) -> Watcher:
        return Capped(self, layers)


@dataclass(frozen=True)
class WGKVSnapKV(WGKV):
    """As WGKV; at its cuts heads with more than `budget` admitted tokens on average each drop a share of theirs.

    The share leaves nine tenths of the budget. The tokens that stay are those that the last `voters` queries attend to:
    softmax over what is stored behind the window, maximum over the group, mean over queries, the best of 5 neighbours.
    """

    budget: int = 4096
    voters: int = 32

    def cut(self, layers: list[Layer], before: int, length: int, tokens: int) -> None:
        super().cut(layers, before, length, tokens)
        old, heads = length - self.window, layers[0].keep.shape[0]
        if old <= 0:
            return
        pinned = [t for t in range(old) if t < self.sinks or self.safe(torch.tensor([t]))[0]]
        for rank in range(self.ranks):
            pairs = [(i, h) for i in range(len(layers)) for h in range(heads) if h * self.ranks // heads == rank]
            stored = {(i, h): layers[i].keep[h, :old].nonzero().flatten().tolist() for i, h in pairs}
            free = {pair: [t for t in found if t not in pinned] for pair, found in stored.items()}
            total, most = sum(map(len, free.values())), self.budget * len(pairs)
            if total <= most:
                continue
            for i, h in pairs:
                votes = self.votes(layers[i], h, stored[i, h], length)
                best = sorted(free[i, h], key=lambda t: -votes[stored[i, h].index(t)])
                for t in best[len(best) * 9 * most // (10 * total) :]:
                    layers[i].keep[h, t] = False

    def votes(self, layer: Layer, head: int, stored: list[int], length: int) -> list[float]:
        group = len(layer.all_queries) // len(layer.keep)
        queries = layer.all_queries[head * group : (head + 1) * group, length - self.voters : length].float()
        attention = (queries @ layer.keys[head, stored].float().T * layer.scale).softmax(-1)  # [G, voters, stored]
        seen = attention.max(0).values.mean(0)
        return [seen[max(i - 2, 0) : i + 3].max().item() for i in range(len(stored))]


class Capped(Watcher):
    """Holds a decoding request to its cap."""

    def __init__(self, rule: WGKV, layers: list[Layer]):
        self.rule, self.layers = rule, layers
        self.kept: dict[int, Positions] = {}  # after each cut, by the request's length

    def after(self, length: int) -> None:
        if length % 128 == 0:
            self.rule.cut(self.layers, 0, length, length)
            self.kept[length] = [[row.nonzero().flatten().tolist() for row in layer.keep] for layer in self.layers]
