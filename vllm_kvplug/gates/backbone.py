"""The frozen model that a gate is trained beside, and the texts it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.masking_utils import sdpa_mask

from vllm_kvplug.errors import PolicyError


def load_backbone(folder: Path, device: str) -> PreTrainedModel:
    """Frozen, in bfloat16 on a GPU and in float32 on a CPU, where bfloat16 is slow."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise PolicyError(f"train-gate: needs full attention in every layer, the model has {sorted(kinds)}")
    return model.to(device).eval().requires_grad_(False)


@contextmanager
def attention_replaced(model: PreTrainedModel, name: str, attend: Callable) -> Iterator[None]:
    """While open, every layer computes attention with `attend`, through transformers' registry."""
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def cut_texts(
    tokenizer: PreTrainedTokenizerBase,
    texts: list[tuple[str, str]],
    length: int,
    shortest: int,
    tokens: int | None,
    special_tokens: bool = True,
) -> list[Tensor]:
    """(name, text) pairs -> token ids, a tensor per piece of at most `length` tokens.

    A longer text gives several pieces; pieces of fewer than `shortest` tokens are left out; `tokens` limits the sum.
    """
    pieces: list[Tensor] = []
    left = tokens
    for _, text in texts:
        has_bos = bool(tokenizer.bos_token) and text.startswith(str(tokenizer.bos_token))
        ids = torch.tensor(tokenizer(text, add_special_tokens=special_tokens and not has_bos).input_ids)
        for piece in ids.split(length):
            piece = piece if left is None else piece[:left]
            if len(piece) < shortest:
                continue
            pieces.append(piece)
            left = None if left is None else left - len(piece)
    if not pieces:
        raise PolicyError(f"train-gate: no text has {shortest} tokens or more: give longer --texts, or more --tokens")
    return pieces
