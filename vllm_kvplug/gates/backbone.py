"""The frozen model that a gate is trained beside, and the texts it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.masking_utils import sdpa_mask

from vllm_kvplug.errors import PolicyError


@dataclass(frozen=True)
class Backbone:
    """A frozen model that is loaded, once, where it is used first: this object may travel to another process before."""

    folder: Path
    device: str

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16 on a GPU and float32 on a CPU, where bfloat16 is slow."""
        return torch.float32 if self.device == "cpu" else torch.bfloat16

    @cached_property
    def config(self) -> Any:
        """The model's. Raises PolicyError for a model with layers that do not attend to everything."""
        config = AutoConfig.from_pretrained(self.folder)
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise PolicyError(f"train-gate: needs full attention in every layer, the model has {sorted(kinds)}")
        return config

    @cached_property
    def model(self) -> PreTrainedModel:
        model: Any = AutoModelForCausalLM.from_pretrained(self.folder, dtype=self.dtype)
        return model.to(self.device).eval().requires_grad_(False)


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
            pieces.append(piece.clone())  # of its own: a view takes the whole text along to another process
            left = None if left is None else left - len(piece)
    if not pieces:
        raise PolicyError(f"train-gate: no text has {shortest} tokens or more: give longer --texts, or more --tokens")
    return pieces
