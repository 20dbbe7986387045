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

from vllm_kvplug import compat
from vllm_kvplug.config import parse_knobs
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.policies.registry import policy_class
from vllm_kvplug.tiny import VOCAB, head_profile, random_gate, random_llama

LENGTHS = (5, 17, 130, 300)  # within a page, just over one, over one chunk of the prompt, over two
CHUNK, STEPS, MAX_LEN, LAYERS = 128, 20, 512, 2


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
    """The knobs with budgets that hold everything; a head profile or a gate is made for the tiny model."""
    cls = policy_class(name)
    knobs = parse_knobs(cls.Config, name, knobs).holding(MAX_LEN).model_dump(exclude_unset=True)
    if "profile" in cls.Config.model_fields:  # a pivot and its satellite in every layer, for retrieval to work on
        roles, weights = [["pivot", "satellite"]] * LAYERS, [[-1.0, 1.0]] * LAYERS
        knobs["profile"] = str(head_profile(model, model.parent / "profile.json", roles, weights))
    if "gate" in cls.Config.model_fields:
        knobs["gate"] = str(random_gate(model, model.parent / "gate.safetensors", name.partition("+")[0]))
    return knobs


def make_model(folder: Path) -> Path:
    return random_llama(folder, layers=LAYERS, kv_heads=2, query_heads=4, hidden_size=128, max_tokens=MAX_LEN)


def _run(model: Path, folder: Path, policy: dict[str, Any]) -> list[list[int]]:
    out = folder / "tokens.json"
    command = [sys.executable, "-m", __spec__.name, str(model), str(out), json.dumps(policy)]
    done = subprocess.run(command, env={**os.environ, **compat.IN_PROCESS}, capture_output=True, text=True)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        engine = "the policy's engine" if policy else "stock vLLM"
        raise PolicyError(f"{engine} does not run: {lines[-1] if lines else f'exit status {done.returncode}'}")
    return json.loads(out.read_text())


def _tokens(model: str, policy: dict[str, Any]) -> list[list[int]]:
    import random

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
