"""Random models on which an engine runs in seconds, and head profiles for them: for `kvplug check` and tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

VOCAB = 320


def random_llama(
    folder: Path,
    *,
    layers: int,
    kv_heads: int,
    query_heads: int,
    hidden_size: int,
    max_tokens: int = 4096,
    seed: int = 0,
) -> Path:
    """Save a float32 Llama that works on token ids, and return `folder`.

    Weights are large enough that attention is far from uniform and greedy tokens vary. head_dim is 32, the smallest
    that stock vLLM serves on a CPU. No end-of-sequence token: a request runs to its full length.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden_size,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=query_heads,
        num_key_value_heads=kv_heads,
        head_dim=32,
        max_position_embeddings=max_tokens,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    return folder


def head_profile(
    model: Path,
    path: Path,
    roles: Sequence[Sequence[str]],
    weights: Sequence[Sequence[float]],
    clusters: Sequence[Mapping[int, Sequence[int]]] | None = None,
) -> Path:
    """Save a head profile that was made up for a model, and return `path`.

    Arguments are as in `HeadProfile`. Without `clusters` the one pivot that a layer may have leads all its satellites.
    """
    from transformers import AutoConfig

    from vllm_kvplug.calibrate.profile import HeadProfile, ProfiledModel, Provenance

    if clusters is None:
        clusters = [_led_by_one(row) for row in roles]
    content = {"roles": roles, "weights": weights, "clusters": clusters}
    described = ProfiledModel.of(AutoConfig.from_pretrained(model), model.name)
    provenance = Provenance(source="made up", date="2026-01-01")
    HeadProfile.model_validate({**content, "model": described, "provenance": provenance}).save(path)
    return path


def _led_by_one(roles: Sequence[str]) -> dict[int, list[int]]:
    satellites = [head for head, role in enumerate(roles) if role == "satellite"]
    return {head: satellites for head, role in enumerate(roles) if role == "pivot"}


def random_gate(model: Path, path: Path, kind: str, seed: int = 0, hidden: int | None = 32) -> Path:
    """Write a gate of random weights for a model, `kind` of wgkv or fastkvzip: for checks of what is done with it.

    hidden: units of a write gate; None for as many as one that is trained has by default.
    """
    import torch
    from transformers import AutoConfig

    from vllm_kvplug.calibrate.profile import ProfiledModel
    from vllm_kvplug.gates.files import GateMetadata, SinkGateShape, WriteGateShape, save_gate

    config = AutoConfig.from_pretrained(model)
    made = ProfiledModel.of(config, Path(model).name)
    units = 4 * made.head_dim if hidden is None else hidden
    shape = WriteGateShape(hidden=units) if kind == "wgkv" else SinkGateShape(hidden_size=config.hidden_size)
    metadata = GateMetadata(model=made, gate=shape, source="random weights", date="2026-01-01")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        gate = metadata.empty_gate().requires_grad_(False)
        for weight in gate.parameters():  # away from the zeros and ones that training begins with
            weight.add_(0.3 * torch.randn(weight.shape))
    save_gate(path, gate, metadata)
    return path
