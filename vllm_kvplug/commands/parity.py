"""A policy whose budgets hold everything against stock vLLM, on a tiny random model made on the spot.

    python -m vllm_kvplug.commands.parity MODEL OUT ARGUMENTS    one engine's greedy tokens, as JSON

Each engine has a process of its own: two in one process share what vLLM keeps globally.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm_kvplug.config import parse_knobs
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.policies.registry import policy_class

LENGTHS = (5, 17, 130, 300)  # within a page, just over one, over one chunk of the prompt, over two
CHUNK, STEPS, MAX_LEN, VOCAB = 128, 20, 512, 320
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def compare(name: str, knobs: dict[str, Any]) -> str:
    """What was compared, in words. PolicyError if an engine does not run or a token differs."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = make_model(folder / "model")
        stock = _run(model, folder, {})
        ours = _run(model, folder, {"kv_policy": name, "kv_policy_config": whole(name, knobs, model)})
    wrong = [length for length, a, b in zip(LENGTHS, stock, ours, strict=True) if a != b]
    if wrong:
        raise PolicyError(f"tokens after prompts of {', '.join(map(str, wrong))} tokens differ from stock vLLM's")
    return f"{len(LENGTHS) * STEPS} greedy tokens equal stock vLLM's"


def whole(name: str, knobs: dict[str, Any], model: Path) -> dict[str, Any]:
    """The knobs with budgets that hold everything; a head profile is made for the tiny model."""
    cls = policy_class(name)
    config = parse_knobs(cls.Config, name, knobs)
    if config.request_knob is not None:
        config = config.for_budget(1.0)
    knobs = config.model_dump(exclude_unset=True)
    if "window" in cls.Config.model_fields and config.request_knob is None:
        knobs["window"] = MAX_LEN
    if "profile" in cls.Config.model_fields:
        knobs["profile"] = str(_write_profile(model, model.parent / "profile.json"))
    return knobs


def make_model(folder: Path) -> Path:
    """A random Llama whose attention is far from uniform; it works on token ids."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LEN,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype="float32",
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _write_profile(model: Path, path: Path) -> Path:
    """A pivot and its satellite in every layer, so that retrieval has something to do."""
    from transformers import AutoConfig

    from vllm_kvplug.calibrate.profile import HeadProfile, ProfiledModel, Provenance, kv_shape, model_fingerprint

    config = AutoConfig.from_pretrained(model)
    layers, kv_heads, query_heads, head_dim = kv_shape(config)
    cluster: dict[int, tuple[int, ...]] = {0: (1,)}
    HeadProfile(
        model=ProfiledModel(
            name="tiny",
            fingerprint=model_fingerprint(config),
            layers=layers,
            kv_heads=kv_heads,
            query_heads=query_heads,
            head_dim=head_dim,
        ),
        roles=(("pivot", "satellite"),) * layers,
        weights=((-1.0, 1.0),) * layers,
        clusters=(cluster,) * layers,
        provenance=Provenance(source="kvplug check", date="2026-01-01"),
    ).save(path)
    return path


def _run(model: Path, folder: Path, policy: dict[str, Any]) -> list[list[int]]:
    out = folder / "tokens.json"
    command = [sys.executable, "-m", __spec__.name, str(model), str(out), json.dumps(policy)]
    done = subprocess.run(command, env={**os.environ, **QUIET}, capture_output=True, text=True)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        engine = "the policy's engine" if policy else "stock vLLM"
        raise PolicyError(f"{engine} does not run: {lines[-1] if lines else f'exit status {done.returncode}'}")
    return json.loads(out.read_text())


def _tokens(model: str, policy: dict[str, Any]) -> list[list[int]]:
    import random

    from vllm_kvplug import compat

    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]
    limits = {"max_model_len": MAX_LEN, "max_num_batched_tokens": CHUNK, "max_num_seqs": 4}
    size = {"kv_cache_memory_bytes": 1 << 28}
    common = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, **limits, **size}
    with compat.llm(model, **common, **policy) as llm:
        outputs = compat.generate(llm, prompts, [STEPS] * len(prompts), ignore_eos=True, detokenize=False)
        return [list(output.token_ids) for output in outputs]


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(_tokens(sys.argv[1], json.loads(sys.argv[3]))))
