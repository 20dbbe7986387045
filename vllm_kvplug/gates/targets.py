"""KVzip's reconstruction scores (2505.23416): the targets of Fast KVzip's gate.

A model that has read a context is asked to repeat it, chunk by chunk. A token is worth as much as the most attention
that any query of the repetition pays it. Shapes: L layers, H KV heads, G query heads a KV head, T context tokens,
d head dim, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from vllm_kvplug.errors import PolicyError
from vllm_kvplug.gates.backbone import attention_replaced

FIRST_PROMPT = "\n\nRepeat the previous context exactly."
LATER_PROMPT = "\n\nRepeat the part of the previous context exactly, starting with "
REMINDER = 8
"""Tokens of the previous chunk that say where the repetition starts."""

QUERY_BLOCK = 256
MARK = "<kvplug-context>"


@dataclass(frozen=True, eq=False)
class Frame:
    """Token ids [n] around a context: before it (system prompt), the two requests to repeat it, the answer's start."""

    before: Tensor
    first: Tensor
    later: Tensor
    answer: Tensor

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Frame:
        """From the chat template; without one, the beginning-of-text token and a line break."""
        before, answer = str(tokenizer.bos_token or ""), "\n"
        if tokenizer.chat_template:
            message = [{"role": "user", "content": MARK}]
            text = str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
            if text.count(MARK) != 1:
                raise PolicyError("train-gate: the model's chat template does not show a user's message as it is")
            before, answer = text.split(MARK)

        def ids(text: str) -> Tensor:
            return torch.tensor(tokenizer(text, add_special_tokens=False).input_ids, dtype=torch.long)

        return cls(ids(before), ids(FIRST_PROMPT), ids(LATER_PROMPT), ids(answer))

    def repetitions(self, context: Tensor, chunk: int) -> Iterator[tuple[int, int, Tensor]]:
        """context [T] -> (first, last) of every chunk in the context, and the input [q] that repeats it."""
        for first in range(0, len(context), chunk):
            last = min(first + chunk, len(context))
            request = [self.later, context[max(first - REMINDER, 0) : first]] if first else [self.first]
            yield first, last, torch.cat([*request, self.answer, context[first:last]])


def chunk_scores(query: Tensor, key: Tensor, before: int, first: int, last: int, scale: float) -> Tensor:
    """Most attention that a repetition pays each token of a chunk: float32 [H, last - first].

    query  [H, G, q, d]  of the repetition's input
    key    [H, k, d]     of `before` tokens, the context, and the repetition's input, which is the last q of k

    The softmax is over the tokens before the context, keys first..last, and the repetition up to the query.
    """
    own = query.shape[2]
    keys = torch.cat([key[:, :before], key[:, first:last], key[:, -own:]], dim=1).float()
    best = keys.new_zeros(len(keys), last - first)
    column = torch.arange(keys.shape[1], device=keys.device) - (keys.shape[1] - own)  # negative: not the repetition's
    for start in range(0, own, QUERY_BLOCK):
        part = query[:, :, start : start + QUERY_BLOCK].float()
        row = torch.arange(start, start + part.shape[2], device=keys.device)
        logits = part @ keys[:, None].transpose(-1, -2) * scale
        attention = logits.masked_fill_(column > row[:, None], -torch.inf).softmax(-1)
        best = torch.maximum(best, attention[..., before : before + last - first].amax((1, 2)))
    return best


@torch.no_grad()
def attention_paid(
    model: PreTrainedModel, cache: DynamicCache, new: Tensor, before: int, first: int, last: int
) -> Tensor:
    """Most attention that `new` tokens [q] pay those at first..last in the cache, as in `chunk_scores`.

    float32 [L, H, last - first], on the CPU. The cache holds the new tokens too, afterwards.
    """
    scores = dict[int, Tensor]()

    def attend(module, query, key, value, attention_mask, scaling=None, **kwargs):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        grouped = query[0].unflatten(0, (key.shape[1], -1))
        scores[module.layer_idx] = chunk_scores(grouped, key[0], before, first, last, scale)
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)

    with attention_replaced(model, "kvplug_attention_paid", attend):
        model.base_model(new[None].to(model.device), past_key_values=cache, use_cache=True)
    return torch.stack([scores[layer] for layer in sorted(scores)]).cpu()


@torch.no_grad()
def reading(model: PreTrainedModel, tokens: Tensor) -> DynamicCache:
    """The cache of a model that has read `tokens` [T]."""
    cache = DynamicCache(config=model.config)
    model.base_model(tokens[None].to(model.device), past_key_values=cache, use_cache=True)
    return cache


def reconstruction_targets(model: PreTrainedModel, frame: Frame, context: Tensor, chunk: int) -> Tensor:
    """context [T] -> float32 [L, H, T] in [0, 1], on the CPU."""
    cache, before, found = reading(model, torch.cat([frame.before, context])), len(frame.before), []
    for first, last, repetition in frame.repetitions(context, chunk):
        found.append(attention_paid(model, cache, repetition, before, before + first, before + last))
        cache.crop(-len(repetition))
    return torch.cat(found, dim=-1)


# ---------------------------------------------------------------- what the gate sees
@contextmanager
def attention_inputs(model: PreTrainedModel, layers: slice) -> Iterator[list[Tensor]]:
    """While open, a forward pass appends the attention inputs [T, D] of those layers, in order, to the list."""
    seen: list[Tensor] = []

    def look(_module: Any, args: tuple, kwargs: dict) -> None:
        seen.append((args[0] if args else kwargs["hidden_states"])[0])

    try:
        stack: Any = model.base_model.layers
        blocks = [layer.self_attn for layer in stack[layers]]
    except AttributeError as error:
        raise PolicyError(f"train-gate: cannot find the attention blocks of {type(model).__name__}: {error}") from None
    hooks = [block.register_forward_pre_hook(look, with_kwargs=True) for block in blocks]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def hidden_states(model: PreTrainedModel, frame: Frame, contexts: list[Tensor], layers: slice) -> Tensor:
    """Attention inputs of those layers for all contexts [layers, total tokens, D], of the model's dtype, beside it."""
    shape = (layers.stop - layers.start, sum(map(len, contexts)), model.config.hidden_size)
    found = torch.empty(shape, dtype=model.dtype, device=model.device)  # filled in place: as large as memory allows
    place = 0
    for context in contexts:
        with attention_inputs(model, layers) as seen:
            model.base_model(torch.cat([frame.before, context])[None].to(model.device), use_cache=False)
        for row, hidden in zip(found, seen, strict=True):
            row[place : place + len(context)] = hidden[len(frame.before) :]
        place += len(context)
    return found
