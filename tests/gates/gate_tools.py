"""Tiny models and gates, with weights far from their initial values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_kvplug.gates.backbone import Backbone

LAYERS, HEADS, QUERY_HEADS, HEAD_DIM, HIDDEN, VOCAB = 3, 2, 6, 8, 24, 64


def tiny_config(**changes: Any) -> LlamaConfig:
    settings = dict(
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=QUERY_HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB,
        initializer_range=0.5,  # sharp attention, so that a token more or less is felt
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaConfig(**(settings | changes))


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(tiny_config()).eval().requires_grad_(False)


def backbone_of(model: LlamaForCausalLM) -> Backbone:
    """A backbone that is this model in memory and never reads a file."""
    backbone = Backbone(Path("nowhere"), "cpu")
    vars(backbone).update(model=model, config=model.config)
    return backbone


def shaken(gate: torch.nn.Module, seed: int = 0, by: float = 0.3) -> Any:
    """The gate with noise on every weight, so that none is left at 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in gate.parameters():
            weight += by * torch.randn(weight.shape, generator=generator)
    return gate.requires_grad_(False)
