"""Models that tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vllm_kvplug.tiny import random_llama


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3 layers, 4 query heads on 2 KV heads, no tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    return random_llama(folder, layers=3, kv_heads=2, query_heads=4, hidden_size=64)


@pytest.fixture(scope="session")
def small_model_dir() -> Path:
    """SmolLM2-135M-Instruct. Skips where it was not downloaded."""
    models = Path(os.environ.get("KVPLUG_MODELS", "~/.cache/vllm_kvplug/models")).expanduser()
    folder = models / "smollm2"
    if not (folder / "config.json").is_file():
        pytest.skip(f"needs SmolLM2-135M-Instruct in {folder}; set KVPLUG_MODELS to the folder above it")
    return folder
