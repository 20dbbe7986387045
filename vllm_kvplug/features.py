"""vLLM features that cannot run together with a KV policy, refused at start-up with the flag to change."""

from __future__ import annotations

from typing import Any

from vllm_kvplug.config import FLAG
from vllm_kvplug.errors import PolicyError


def check_config(vllm_config: Any) -> None:
    """PolicyError for the first thing in a finished VllmConfig that head pages do not serve."""
    for refusal in refusals(vllm_config):
        raise PolicyError(refusal)


def refusals(vllm_config: Any) -> list[str]:
    """Everything in a VllmConfig that head pages do not serve, with the flag to change."""
    return [f"{FLAG} does not work with {what} yet: {change}" for found, what, change in _rules(vllm_config) if found]


def _rules(config: Any) -> list[tuple[Any, str, str]]:
    """(is it used, what it is, what to change), in the order they are reported."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    text = model.hf_text_config
    drop = f"remove {FLAG} for this model"
    return [
        (model.runner_type != "generate", f"{model.runner_type} models", drop),
        (model.is_encoder_decoder, "encoder-decoder models", drop),
        (model.use_mla, "multi-head latent attention", drop),
        (model.is_hybrid or model.is_attention_free, "models with state-space layers", drop),
        (getattr(text, "sliding_window", None) and model.get_sliding_window(), "sliding-window attention", drop),
        (getattr(text, "num_kv_shared_layers", 0), "KV sharing between layers", drop),
        (model.is_multimodal_model, "multimodal models", drop),
        (cache.enable_prefix_caching, "prefix caching", "remove --enable-prefix-caching"),
        (
            cache.cache_dtype not in ("auto", "fp8", "fp8_e4m3", str(model.dtype).removeprefix("torch.")),
            f"--kv-cache-dtype {cache.cache_dtype}",
            "remove it, or use fp8",
        ),
        (config.speculative_config, "speculative decoding", "remove --speculative-config"),
        (config.lora_config, "LoRA adapters", "remove --enable-lora"),
        (config.kv_transfer_config, "KV connectors", "remove --kv-transfer-config and --kv-offloading-size"),
        (model.enable_sleep_mode, "sleep mode", "remove --enable-sleep-mode"),
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism", "use --pipeline-parallel-size 1"),
        (parallel.data_parallel_size > 1, "data parallelism", "use --data-parallel-size 1 and several servers"),
        (parallel.decode_context_parallel_size > 1, "context parallelism", "use --decode-context-parallel-size 1"),
        # Both halves of a batch would go through one set of persistent row tensors.
        (parallel.use_ubatching, "dual-batch overlap", "remove --enable-dbo and --ubatch-size"),
        (_splits_unevenly(model, parallel), "a tensor split that cuts a KV head", "change --tensor-parallel-size"),
    ]


def _splits_unevenly(model: Any, parallel: Any) -> bool:
    heads, ranks = model.get_total_num_kv_heads(), parallel.tensor_parallel_size
    return bool(heads % ranks and ranks % heads)
