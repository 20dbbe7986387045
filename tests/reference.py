"""The slow, obviously right implementation that every policy is held to.

`Reference.replay` runs ONE request through a Hugging Face causal LM. Nothing is ever deleted: keys and
values of all tokens stay in plain tensors, and a boolean mask per (layer, KV head, token) says which of
them a policy would still store. Attention is a float32 softmax over what the mask leaves, head by head.
Written from the descriptions of the policies, sharing no code with them.

Notation: L layers, H KV heads, Hq query heads, G = Hq / H, d head dim, T tokens so far, n new tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import AttentionInterface

ATTENTION = "kvplug_reference"

Budgets = list[list[int]]  # [L][H] -> number of tokens
Positions = list[list[list[int]]]  # [L][H] -> ascending token positions


@dataclass
class Layer:
    """What one layer has seen of a request. New tokens are appended by every forward pass.

    queries [Hq, n, d], those of the latest forward pass; keys, values [H, T, d]; both after RoPE.
    keep [H, T] bool: the token is still stored for that head. scale: softmax scale. gate [H, T]: what the rule
    scored each token when it came in. all_queries [Hq, T, d].
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    keep: torch.Tensor
    scale: float
    gate: torch.Tensor
    all_queries: torch.Tensor = field(default_factory=lambda: torch.empty(0))


class Rule:
    """What a query sees, and what each head keeps of a prompt. The default keeps everything."""

    newest = 0  # so many of the prompt's last tokens are kept before all others
    layers_share = False  # the heads of a layer divide the sum of their budgets, by score
    protect: Sequence[tuple[int, int]] = ()  # ranges of the prompt that every head keeps, beyond its budget if need be
    context_end: int | None = None  # so many tokens are the prompt as far as the rule is concerned; None: all

    def sees(self, query_pos: torch.Tensor, key_pos: torch.Tensor) -> torch.Tensor:
        """query_pos [n], key_pos [T] -> bool [n, T]. What the newest query cannot see is not stored."""
        return key_pos[None, :] <= query_pos[:, None]

    def budgets(self, layers: int, heads: int, tokens: int) -> Budgets | None:
        """Tokens that each head keeps of a complete prompt of `tokens`; None: nothing is dropped."""
        return None

    def scores(self, index: int, layer: Layer) -> torch.Tensor:
        """float32 [H, T] of a complete prompt at layer number `index`; higher is kept."""
        raise NotImplementedError

    def lets_through(self, layer: Layer, query_pos: torch.Tensor, key_pos: torch.Tensor) -> torch.Tensor:
        """As `sees`, for what depends on the layer's gate as well: bool [H, n, T]."""
        return self.sees(query_pos, key_pos).expand(len(layer.keep), -1, -1)

    def gate(self, index: int, key: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of tokens that come in at layer number `index`, float32 [H, n].

        key [H, n, d], after RoPE; hidden [n, D], what enters the attention block.
        """
        return torch.zeros(key.shape[:2])

    def cuts(self, tokens: int) -> list[int]:
        """Lengths at which a prompt of `tokens` is cut as it comes in, its own included; ascending."""
        return []

    def cut(self, layers: list[Layer], before: int, length: int, tokens: int) -> None:
        """Drop tokens of a prompt of `tokens` of which `length` are in; the last cut was at `before`."""

    def watch(self, layers: list[Layer], tokens: int) -> Watcher:
        """What happens to stored tokens behind a complete prompt; all of `tokens` are given, more are decoded."""
        return Watcher()


class Watcher:
    """Sees every decoding step. The default changes nothing."""

    def before(self, length: int) -> None:
        """Before the forward pass of the token that makes the request `length` tokens long."""

    def after(self, length: int) -> None:
        """After it."""


@dataclass(frozen=True)
class Full(Rule):
    """Every token of every head."""


@dataclass(frozen=True)
class Streaming(Rule):
    """The first `sinks` tokens and the last `window`, for every query of prompt and answer alike."""

    sinks: int = 4
    window: int = 1024

    def sees(self, query_pos: torch.Tensor, key_pos: torch.Tensor) -> torch.Tensor:
        query_pos, key_pos = query_pos[:, None], key_pos[None, :]
        recent = key_pos > query_pos - self.window
        return (key_pos <= query_pos) & (recent | (key_pos < self.sinks))


@dataclass(frozen=True)
class SnapKV(Rule):
    """Each head keeps the last `window` tokens, and those before them that the window's queries attend to."""

    ratio: float | None = None
    budget_tokens: int | None = None
    window: int = 64
    kernel: int = 5
    layers_share: bool = False

    @property
    def newest(self) -> int:
        return self.window

    def budgets(self, layers: int, heads: int, tokens: int) -> Budgets:
        return [[uniform_budget(tokens, self.ratio, self.budget_tokens)] * heads for _ in range(layers)]

    def scores(self, index: int, layer: Layer) -> torch.Tensor:
        before = max(layer.keys.shape[1] - self.window, 0)  # tokens before the window
        result = torch.full(layer.keep.shape, torch.inf)  # the window itself is kept anyway
        for head in range(len(result)):
            votes = [a[:, :before].mean(0) for a in group_attention(layer, head, self.window)]
            result[head, :before] = torch.stack([average_pool(v, self.kernel) for v in votes]).mean(0)
        return result


@dataclass(frozen=True)
class RandomKeep(Rule):
    """Each head keeps tokens of the prompt drawn from its own generator."""

    ratio: float | None = None
    seed: int = 0
    budget_tokens: int | None = None

    def budgets(self, layers: int, heads: int, tokens: int) -> Budgets:
        return [[uniform_budget(tokens, self.ratio, self.budget_tokens)] * heads for _ in range(layers)]

    def scores(self, index: int, layer: Layer) -> torch.Tensor:
        heads, tokens = layer.keep.shape
        first = (self.seed * 1_000_003 + index) * 1_000_003
        generators = [torch.Generator().manual_seed(first + head) for head in range(heads)]
        return torch.stack([torch.rand(tokens, generator=generator) for generator in generators])


@dataclass(frozen=True)
class HeteroCache(Rule):
    """Volatile and pivot heads keep all; anchors and satellites share the rest by their profiled weight.

    profile: a head profile's JSON as a dict, with roles [L][H] and weights [L][H] (-1 for full heads).
    """

    profile: dict[str, Any]
    rho: float = 0.5
    window: int = 1
    kernel: int = 5
    min_tokens: int = 16

    def budgets(self, layers: int, heads: int, tokens: int) -> Budgets:
        roles, weights = self.profile["roles"], self.profile["weights"]
        pairs = [(i, h) for i in range(layers) for h in range(heads)]
        compressed = [(i, h) for i, h in pairs if roles[i][h] in ("anchor", "satellite")]
        full = len(pairs) - len(compressed)
        # In floating point on purpose: where rho * heads is not exact this is the documented value.
        total = int((Fraction(str(self.rho)) * len(pairs) - full) * tokens)
        low = min(self.min_tokens, tokens)
        result = [[tokens] * heads for _ in range(layers)]
        shares = share_out(total, [weights[i][h] for i, h in compressed], low, tokens)
        for (i, h), share in zip(compressed, shares, strict=True):
            result[i][h] = share
        return result

    def scores(self, index: int, layer: Layer) -> torch.Tensor:
        result = torch.empty(layer.keep.shape)
        for head in range(len(result)):
            votes = [a.mean(0) for a in group_attention(layer, head, self.window)]
            result[head] = torch.stack([average_pool(v, self.kernel) for v in votes]).max(0).values
        return result


def uniform_budget(tokens: int, ratio: float | None, budget_tokens: int | None) -> int:
    """The budget of one head: a share of the prompt (half of it by default) or a number; 1..tokens."""
    share = Fraction(str(0.5 if ratio is None else ratio))
    wanted = int(tokens * share) if budget_tokens is None else budget_tokens
    return max(1, min(wanted, tokens))


def group_attention(layer: Layer, head: int, window: int) -> list[torch.Tensor]:
    """Causal attention of the last `window` queries (or all): [window, T] per query head of the group."""
    group = layer.queries.shape[0] // layer.keys.shape[0]
    position = torch.arange(layer.keys.shape[1])
    causal = position[None, :] <= position[-window:, None]
    queries = layer.queries[head * group : (head + 1) * group, -window:]
    return [masked_softmax(q, layer.keys[head], causal, layer.scale) for q in queries]


def masked_softmax(q: torch.Tensor, k: torch.Tensor, visible: torch.Tensor, scale: float) -> torch.Tensor:
    """q [n, d], k [T, d], visible bool [n, T] -> attention [n, T], float32."""
    return (q.float() @ k.float().T * scale).masked_fill(~visible, -torch.inf).softmax(-1)


def average_pool(scores: torch.Tensor, kernel: int) -> torch.Tensor:
    """scores [T] -> [T]: mean of the `kernel` values around each, zeros beyond both ends."""
    padded = torch.cat([torch.zeros(kernel // 2), scores, torch.zeros(kernel)])
    return torch.stack([padded[i : i + len(scores)] for i in range(kernel)]).sum(0) / kernel


def share_out(total: int, weights: Sequence[float], low: int, high: int) -> list[int]:
    """Integers in [low, high] that sum to `total` (clamped to what the bounds allow) and follow `weights`.

    The exact share of a head is scale * weight, clamped; the scale is the one at which the shares sum to
    the total. Rounded by largest remainder, ties to the earlier head.
    """
    total = min(max(total, len(weights) * low), len(weights) * high)
    exact = [Fraction(w) for w in weights]
    positive = sum(w > 0 for w in exact)
    if total > positive * high + (len(weights) - positive) * low:
        # All heads with a weight are full. The limit of tiny equal weights: the others share evenly.
        others = iter(share_out(total - positive * high, [1.0] * (len(weights) - positive), low, high))
        return [high if w > 0 else next(others) for w in exact]

    def shares(scale: Fraction) -> list[Fraction]:
        return [min(max(scale * w, Fraction(low)), Fraction(high)) for w in exact]

    # Between two scales at which some head reaches a bound, the sum of the shares is a straight line.
    bends = sorted({Fraction(0)} | {Fraction(bound) / w for w in exact if w > 0 for bound in (low, high)})
    after = bisect_right(bends, total, key=lambda scale: sum(shares(scale)))
    scale = bends[after - 1]
    if after < len(bends):
        start, end = sum(shares(scale)), sum(shares(bends[after]))
        scale += (bends[after] - scale) * (total - start) / (end - start)

    fair = shares(scale)
    result = [int(share) for share in fair]
    by_remainder = sorted(range(len(fair)), key=lambda i: (result[i] - fair[i], i))
    for i in by_remainder[: total - sum(result)]:
        result[i] += 1
    return result


def protected(ranges: Sequence[tuple[int, int]], tokens: int) -> list[int]:
    """Positions in disjoint ranges, of the first `tokens`."""
    return [t for start, end in ranges for t in range(start, min(end, tokens))]


def ranking(scores: torch.Tensor, newest: int, protect: Sequence[tuple[int, int]]) -> list[tuple[float, ...]]:
    """What a head's tokens are sorted by: protected ones, the last `newest`, then by score [T], then the earlier."""
    tokens = len(scores)
    values = scores.tolist()

    def rank(t: int) -> tuple[float, ...]:
        if any(start <= t < end for start, end in protect):
            return 0, t
        return (1, -t) if t >= tokens - newest else (2, -values[t], t)

    return [rank(t) for t in range(tokens)]


def pick(scores: torch.Tensor, budget: int, newest: int, protect: Sequence[tuple[int, int]] = ()) -> list[int]:
    """A head's `budget` tokens, in order of position; all that are protected if these are more."""
    ranks = ranking(scores, newest, protect)
    best = sorted(range(len(ranks)), key=ranks.__getitem__)
    return sorted(best[: max(budget, len(protected(protect, len(ranks))))])


def share_layer(
    scores: torch.Tensor, budgets: Sequence[int], newest: int, protect: Sequence[tuple[int, int]]
) -> list[int]:
    """How many tokens each head of a layer keeps, scores [H, T], where all of them divide the sum of their budgets.

    Every head first has what is protected, and of its best others a fifth of an even share; then the best of all come.
    """
    heads, tokens = scores.shape
    safe = len(protected(protect, tokens))
    together = sum(max(budget, safe) for budget in budgets)
    own = safe + int(Fraction(together - safe * heads, heads) / 5)
    ranks = [ranking(row, newest, protect) for row in scores]
    counts, others = [own] * heads, []
    for head, row in enumerate(ranks):
        others += [(rank, head) for rank in sorted(row)[own:]]
    for _, head in sorted(others)[: together - own * heads]:
        counts[head] += 1
    return counts


@dataclass
class Replay:
    """One request, replayed.

    tokens [steps]: the greedy choice at every step. With forced tokens these are still the model's own
        choices, each after the forced tokens before it.
    logits: float32 [steps, vocab]; row i is what tokens[i] was chosen from.
    kept_after_prompt: what was stored when the (latest) prompt had been computed and cut down.
    kept_at_end: what was stored when the last token was produced; that token's own K,V is not.
    kept: what every query behind the (latest) prompt saw, by the length of the request with that query's token.
    watcher: the rule's, after the (latest) prompt.
    kept_in_prompt: what was stored after each cut of the (latest) prompt, by its length then.
    layers: all that was seen of the (latest) request.
    scores: float32 [L] x [H, T] behind kept_after_prompt, empty for rules that do not score. Two engines
        round differently: a token whose score ties with the cut up to rounding may fall on either side.
    """

    tokens: list[int] = field(default_factory=list)
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    kept_after_prompt: Positions = field(default_factory=list)
    kept_at_end: Positions = field(default_factory=list)
    kept_in_prompt: dict[int, Positions] = field(default_factory=dict)
    kept: dict[int, Positions] = field(default_factory=dict)
    watcher: Watcher = field(default_factory=Watcher)
    layers: list[Layer] = field(default_factory=list)
    scores: list[torch.Tensor] = field(default_factory=list)


class State:
    """The K,V of one request, and the attention that the model calls in place of its own."""

    def __init__(self, rule: Rule, stored: Callable[[torch.Tensor], torch.Tensor]):
        self.rule, self.stored = rule, stored
        self.layers: list[Layer] = []

    def attend(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        hidden: torch.Tensor,
    ) -> torch.Tensor:
        """query [Hq, n, d], key and value [H, n, d], hidden [n, D] of the new tokens -> [n, Hq, d]. Stores K,V."""
        heads, new = key.shape[:2]
        stored = torch.ones(heads, new, dtype=torch.bool)
        if index == len(self.layers):
            nothing = key[:, :0], value[:, :0], stored[:, :0], scale, torch.zeros(heads, 0), query[:, :0]
            self.layers.append(Layer(query, *nothing))
        layer = self.layers[index]
        layer.queries, layer.all_queries = query, torch.cat([layer.all_queries, query], 1)
        before = layer.keys.shape[1]
        if new == 1:  # written before it attends
            key, value = self.stored(key), self.stored(value)
        layer.keys = torch.cat([layer.keys, key], 1)
        layer.values = torch.cat([layer.values, value], 1)
        layer.keep = torch.cat([layer.keep, stored], 1)
        layer.gate = torch.cat([layer.gate, self.rule.gate(index, key, hidden)], 1)
        position = torch.arange(layer.keys.shape[1])
        sees = self.rule.lets_through(layer, position[-new:], position)  # [H, n, T]
        outputs = []
        for query_head in range(query.shape[0]):
            head = query_head // (query.shape[0] // heads)
            weights = masked_softmax(query[query_head], layer.keys[head], sees[head] & layer.keep[head], scale)
            outputs.append(weights @ layer.values[head].float())
        layer.keys[:, before:], layer.values[:, before:] = self.stored(key), self.stored(value)
        layer.keep &= sees[:, -1]
        return torch.stack(outputs, 1).to(query.dtype)

    def complete_prompt(self) -> list[torch.Tensor]:
        """Cuts every head down to its budget; returns the scores, [L] x [H, T]."""
        heads, tokens = self.layers[0].keep.shape
        budgets = self.rule.budgets(len(self.layers), heads, tokens)
        if budgets is None:
            return []
        scores = [self.rule.scores(index, layer) for index, layer in enumerate(self.layers)]
        for index, layer in enumerate(self.layers):
            layer.keep[:] = False
            how = self.rule.newest, self.rule.protect
            counts = share_layer(scores[index], budgets[index], *how) if self.rule.layers_share else budgets[index]
            for head in range(heads):
                layer.keep[head, pick(scores[index][head], counts[head], *how)] = True
        return scores

    def kept(self) -> Positions:
        return [[row.nonzero().flatten().tolist() for row in layer.keep] for layer in self.layers]


def _attention(module, query, key, value, attention_mask, scaling, kvplug_state: State, **_):
    """The attention function registered with transformers; the state travels as a keyword of the forward."""
    assert query.shape[0] == 1, "one request at a time"
    hidden = module.kvplug_hidden[0]
    return kvplug_state.attend(module.layer_idx, query[0], key[0], value[0], scaling, hidden)[None], None


def _remember_hidden(module, args, kwargs):
    module.kvplug_hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]


AttentionInterface.register(ATTENTION, _attention)


class Reference:
    """A causal LM whose attention is replaced. A model object is used as it is, and is ours from then on.

    stored: what becomes of K and V that are stored. A prompt attends to itself before it is.
    """

    def __init__(
        self,
        model: str | Path | torch.nn.Module,
        dtype: torch.dtype = torch.float32,
        stored: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    ):
        if not isinstance(model, torch.nn.Module):
            model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        model.set_attn_implementation(ATTENTION)
        for module in model.modules():
            if hasattr(module, "layer_idx") and hasattr(module, "k_proj"):
                module.register_forward_pre_hook(_remember_hidden, with_kwargs=True)
        self.model, self.stored = model.eval(), stored

    @torch.inference_mode()
    def replay(
        self,
        prompt_ids: list[int],
        rule: Rule,
        max_new_tokens: int,
        force_tokens: list[int] | None = None,
        resume_at: int | None = None,
    ) -> Replay:
        """Greedy decoding of exactly `max_new_tokens` (an end-of-sequence token does not stop it).

        force_tokens: the first tokens of the answer, whatever the model would choose.
        resume_at: the request is preempted when prompt and answer have that many tokens. All of them are
            then computed anew as one prompt, to whose end the rule is applied, and decoding goes on.
        A rule's context_end ends the prompt before the rest of it is seen, which is then fed as an answer would be.
        """
        end = len(prompt_ids) + max_new_tokens
        if resume_at is not None and not len(prompt_ids) <= resume_at < end:
            raise ValueError(f"resume_at must be in {len(prompt_ids)}..{end - 1}, not {resume_at}")
        forced = iter(force_tokens or [])
        sequence, logits, result, state = list(prompt_ids), [], Replay(), None
        while len(sequence) < end:
            if state is None or len(sequence) == resume_at:
                state = State(rule, self.stored)
                context = sequence[: rule.context_end]
                logits.append(self._prompt(state, context, result))
                result.scores = state.complete_prompt()
                result.kept_after_prompt = state.kept()
                result.watcher = rule.watch(state.layers, len(sequence))
                for length in range(len(context) + 1, len(sequence) + 1):  # as if it were an answer
                    logits[-1] = self._step(state, sequence[:length], result)
            else:
                logits.append(self._step(state, sequence, result))
            result.tokens.append(int(logits[-1].argmax()))
            sequence.append(next(forced, result.tokens[-1]))
        result.logits = torch.stack(logits)
        result.kept_at_end, result.layers = state.kept(), state.layers
        return result

    def _prompt(self, state: State, sequence: list[int], result: Replay) -> torch.Tensor:
        """Runs a prompt, cut by cut if the rule cuts it as it comes in; float32 [vocab] after its last token."""
        before, tokens = 0, len(sequence)
        result.kept_in_prompt = {0: []}
        for length in state.rule.cuts(tokens) or [tokens]:
            logits = self._forward(state, sequence[before:length], before)
            state.rule.cut(state.layers, before, length, tokens)
            result.kept_in_prompt[length] = state.kept()
            before = length
        return logits

    def _step(self, state: State, sequence: list[int], result: Replay) -> torch.Tensor:
        """Runs the last token of a sequence behind a complete prompt; float32 [vocab] after it."""
        length = len(sequence)
        result.watcher.before(length)
        logits = self._forward(state, sequence[-1:], length - 1)
        result.kept[length] = state.kept()
        result.watcher.after(length)
        return logits

    def _forward(self, state: State, new: list[int], start: int) -> torch.Tensor:
        """Runs the tokens at positions start, start + 1, ...; float32 [vocab] after the last of them."""
        ids, at = torch.tensor([new]), torch.arange(start, start + len(new))[None]
        output = self.model(ids, position_ids=at, use_cache=False, logits_to_keep=1, kvplug_state=state)
        return output.logits[0, -1].float()
