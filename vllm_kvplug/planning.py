"""How many requests fit on a GPU under a policy, from a model's config alone.

Blocks, tables and the host tier are computed as the engine computes them. Weights and activations are estimates:
what vLLM finds free once it has loaded and profiled the model is not known before.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_kvplug.calibrate.profile import kv_shape, model_fingerprint
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.memory import Charges, Geometry, charges, decode_plan_bytes
from vllm_kvplug.plan import PagePlan, largest
from vllm_kvplug.policies.base import Policy
from vllm_kvplug.rotary import rotary_angles
from vllm_kvplug.shape import ModelShape

MULTIPROCESSORS = 132
"""Of an H100 or H200; the decode kernel's plan for them is small on any GPU."""


@dataclass(frozen=True)
class Engine:
    """What an engine is started with, as far as memory depends on it.

    dtype: of the model. multiprocessors: of a GPU, 0 for a CPU. page_dtype: of the KV cache, the model's if None.
    """

    shape: ModelShape
    dtype: torch.dtype
    max_requests: int
    max_batch: int
    multiprocessors: int = MULTIPROCESSORS
    page_dtype: torch.dtype | None = None

    def geometries(self, max_tokens: int) -> list[Geometry]:
        """Of every rank, if no request has more than `max_tokens` tokens."""
        ranks = range(self.shape.tensor_parallel)
        limits = self.max_requests, max_tokens
        return [Geometry.of_rank(self.shape, r, self.dtype, *limits, self.page_dtype) for r in ranks]


@dataclass(frozen=True)
class Forecast:
    """An engine whose requests have prompts of `context` tokens and are no longer than that; bytes are of one rank.

    blocks: in the pool, one of them vLLM's null block. prompt_blocks, decode_blocks: of a request while its prompt is
    computed and after. prompts: requests that fit before their prompts are complete. decoding: requests that decode
    at once; each had room for its whole prompt beside those before it. max_concurrency: what vLLM logs.
    longest: tokens of the longest request that could be served. host_bytes: of the host tier, for one request.
    """

    policy: str
    context: int
    block_bytes: int
    blocks: int
    charges: Charges
    prompt_blocks: int
    decode_blocks: int
    prompts: int
    decoding: int
    max_concurrency: float
    longest: int
    host_bytes: int = 0
    host_total_bytes: int = 0

    @property
    def table_bytes(self) -> int:
        """Everything beside head pages."""
        return self.charges.fixed + self.charges.per_block * self.blocks


def forecast(policy: Policy[Any] | None, engine: Engine, context: int, most: int, available: int) -> Forecast:
    """What an engine with `available` bytes for its KV cache can hold; no policy: stock vLLM.

    most: tokens of the longest request that the model allows.
    """
    plan = PagePlan(engine.shape, None) if policy is None else policy.plan()
    charged, blocks = pool(policy, engine, context, available)
    prompt, decode = plan.prompt_blocks(context), plan.decode_blocks(context, context)
    usable = max(blocks - 1, 0)
    limits = [engine.max_requests, *_host_limit(policy, engine, context)]
    host = policy.host_slot_bytes(engine.dtype.itemsize) if policy and policy.offloads else 0
    return Forecast(
        policy="stock" if policy is None else policy.name,
        context=context,
        block_bytes=engine.geometries(context)[0].block_bytes,
        blocks=blocks,
        charges=charged,
        prompt_blocks=prompt,
        decode_blocks=decode,
        prompts=min(usable // prompt, *limits),
        decoding=min((usable - prompt) // decode + 1 if usable >= prompt else 0, *limits),
        max_concurrency=blocks / plan.peak_blocks(context),
        longest=largest(lambda n: _serves(policy, engine, n, available), most),
        host_bytes=policy.host_slots(context) * host if policy else 0,
        host_total_bytes=policy.host_capacity(engine.dtype.itemsize) * host if policy else 0,
    )


def pool(policy: Policy[Any] | None, engine: Engine, max_tokens: int, available: int) -> tuple[Charges, int]:
    """The charges and blocks of the rank that has the fewest."""
    found = []
    for geometry in engine.geometries(max_tokens):
        rank = Charges()
        if policy is not None:
            plan = decode_plan_bytes(geometry, engine.max_requests, engine.multiprocessors)
            plan *= 2 if policy.page_selection else 1
            on_gpu = (plan, engine.max_requests) if engine.multiprocessors else (0, 0)
            rank = charges(policy, geometry, engine.max_batch, *on_gpu)
        left = rank.pool_bytes(available, geometry.block_bytes)
        found.append((max(left, 0) // geometry.block_bytes, rank))
    blocks, rank = min(found, key=lambda pair: pair[0])
    return rank, blocks


def _serves(policy: Policy[Any] | None, engine: Engine, tokens: int, available: int) -> bool:
    plan = PagePlan(engine.shape, None) if policy is None else policy.plan()
    _, blocks = pool(policy, engine, tokens, available)
    return plan.peak_blocks(tokens) < blocks and all(_host_limit(policy, engine, tokens))


def _host_limit(policy: Policy[Any] | None, engine: Engine, tokens: int) -> list[int]:
    """How many requests the host tier holds, if they need it at all."""
    slots = policy.host_slots(tokens) if policy else 0
    return [policy.host_capacity(engine.dtype.itemsize) // slots] if policy and slots else []


# ------------------------------------------------------------------------------------------ models


def model_config(model: str) -> Any:
    """A model's config; PolicyError if there is none."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise PolicyError(f"{model}: {str(error).strip().splitlines()[0]}") from None


def model_shape(config: Any, name: str, tensor_parallel: int, page_itemsize: int = 2) -> ModelShape:
    """The shape of a config's text model; PolicyError where tensor parallelism would cut a KV head."""
    text = config.get_text_config()
    layers, kv_heads, query_heads, head_dim = kv_shape(text)
    if query_heads % tensor_parallel or (kv_heads % tensor_parallel and tensor_parallel % kv_heads):
        raise PolicyError(
            f"--tensor-parallel {tensor_parallel} does not divide {query_heads} query heads and {kv_heads} KV heads"
        )
    fingerprint, rotary = model_fingerprint(text), rotary_angles(text)
    heads = layers, kv_heads, query_heads, head_dim
    return ModelShape(*heads, tensor_parallel, fingerprint, name, rotary, page_itemsize)


def weight_bytes(model: str, config: Any, dtype: torch.dtype) -> int:
    """Bytes of all weights: of the checkpoint's files if it is quantised, else its parameters in `dtype`."""
    stored = _stored_bytes(model)
    if getattr(config, "quantization_config", None):
        if not stored:
            raise PolicyError(f"{model}: the size of quantised weights is not known without their files; download them")
        return stored
    saved = getattr(config, "dtype", None)
    if stored and isinstance(saved, torch.dtype):
        return stored * dtype.itemsize // saved.itemsize
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):  # shapes without memory
        network = AutoModelForCausalLM.from_config(config)
    return dtype.itemsize * sum(p.numel() for p in network.parameters())


def _stored_bytes(model: str) -> int:
    """Bytes that an index or the files of a checkpoint on this machine name; 0 if there are none."""
    from transformers.utils import cached_file

    options = {"local_files_only": True, "_raise_exceptions_for_missing_entries": False}
    index = cached_file(model, "model.safetensors.index.json", **options)
    if index:
        return int(json.loads(Path(index).read_text())["metadata"]["total_size"])
    single = cached_file(model, "model.safetensors", **options)
    return Path(single).stat().st_size if single else 0


def activation_bytes(config: Any, dtype: torch.dtype, tensor_parallel: int, max_batch: int, max_requests: int) -> int:
    """A rough peak of vLLM's profile run: one MLP over a full batch, and logits of all requests in sampling."""
    text = config.get_text_config()
    wide = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    hidden = max_batch * (2 * text.hidden_size + 3 * wide // tensor_parallel) * dtype.itemsize
    logits = max_requests * text.vocab_size * (dtype.itemsize + 8)
    return hidden + logits
