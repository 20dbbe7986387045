"""Models that tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama without a tokenizer: 3 layers, 4 query heads on 2 KV heads, vocabulary of 320.

    Weights are large enough that attention is far from uniform and greedy tokens vary. head_dim is 32, the
    smallest that stock vLLM serves on a CPU. No end-of-sequence token: a request runs to its full length.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def small_model_dir() -> Path:
    """SmolLM2-135M-Instruct. Skips where it was not downloaded."""
    models = Path(os.environ.get("KVPLUG_MODELS", "~/.cache/vllm_kvplug/models")).expanduser()
    folder = models / "smollm2"
    if not (folder / "config.json").is_file():
        pytest.skip(f"needs SmolLM2-135M-Instruct in {folder}; set KVPLUG_MODELS to the folder above it")
    return folder
