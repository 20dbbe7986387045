"""vLLM's workers, holding the runtime of a KV policy."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import AttentionSpec, replace_as
from vllm.v1.worker.gpu_worker import Worker

from vllm_kvplug import compat
from vllm_kvplug.config import ADDITIONAL_KEY, CONFIG_FLAG
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.lifecycle import ATTRIBUTE
from vllm_kvplug.memory import Geometry
from vllm_kvplug.placement.pool import FP8
from vllm_kvplug.policies.registry import policy_from_json
from vllm_kvplug.scheduler.spec import HeadPageSpec
from vllm_kvplug.worker.hidden import install_tap
from vllm_kvplug.worker.peers import TensorParallelPeers
from vllm_kvplug.worker.runtime import Runtime

logger = init_logger("vllm.kvplug.worker")

GIB = 1 << 30


class PolicyWorkerMixin:
    """Creates the runtime before the model, charges its memory, and brackets every step."""

    vllm_config: Any
    model_runner: Any
    device: Any

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        self.runtime = self._make_runtime()
        self._counts: Counter[str] = Counter()
        compat.attach_runtime(self.vllm_config, self.runtime)
        if self.runtime.projected is not None:
            install_tap()
        result = super().load_model(*args, **kwargs)  # type: ignore[misc]
        if self.runtime.spares_gate:
            compat.keep_from_decode_graphs(self.model_runner, lambda: self.runtime.in_step and self.runtime.gate_asked)
        missing = set(range(self.runtime.geometry.layers)) - self.runtime.tapped
        if self.runtime.projected is not None and missing:
            raise PolicyError(
                f"policy '{self.runtime.policy.name}' reads hidden states where vLLM computes Q, K and V in one layer, "
                f"which this model does not do in layer {min(missing)}: choose another --kv-policy"
            )
        return result

    def _make_runtime(self) -> Runtime:
        config = self.vllm_config
        shape = compat.model_shape(config)
        policy = policy_from_json(json.dumps(config.additional_config[ADDITIONAL_KEY], sort_keys=True), shape)
        scheduler, longest = config.scheduler_config, config.model_config.max_model_len
        rank, dtype = get_tensor_model_parallel_rank(), config.model_config.dtype
        pages = compat.page_dtype(config)
        geometry = Geometry.of_rank(shape, rank, dtype, scheduler.max_num_seqs, longest, pages)
        captured = max(config.compilation_config.cudagraph_capture_sizes or [0])
        max_rows = max(scheduler.max_num_seqs, captured)
        max_batch = max(scheduler.max_num_batched_tokens, max_rows)
        peers = TensorParallelPeers() if policy.retrieval and shape.tensor_parallel > 1 else None
        return Runtime(policy, geometry, self.device, max_batch, max_rows, peers, runner=self.model_runner)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        policy = json.dumps(self.vllm_config.additional_config[ADDITIONAL_KEY], sort_keys=True)
        shape = compat.model_shape(self.vllm_config)
        specs = super().get_kv_cache_spec()  # type: ignore[misc]
        odd = [name for name, spec in specs.items() if not isinstance(spec, AttentionSpec)]
        if odd:
            raise PolicyError(
                f"--kv-policy: layer {odd[0]} has no per-token KV cache; remove --kv-policy for this model"
            )
        more = {"policy": policy, "shape": shape, "itemsize": self.vllm_config.model_config.dtype.itemsize}
        return {name: replace_as(spec, HeadPageSpec, **more) for name, spec in specs.items()}

    def determine_available_memory(self) -> int:
        """What vLLM found, less what tables, windows and workspace will take."""
        available = super().determine_available_memory()  # type: ignore[misc]
        block = sum(spec.page_size_bytes for spec in self.get_kv_cache_spec().values())
        charges = self.runtime.charges
        left = charges.pool_bytes(available, block)
        arena = available - left
        limit = self.runtime.policy.config.arena_gib
        if limit is not None and arena > limit * GIB:
            raise PolicyError(
                f"tables and windows need {arena / GIB:.2f} GiB beside the KV pages, more than arena_gib={limit}: "
                f"raise arena_gib in {CONFIG_FLAG}, or lower --max-num-seqs or --max-model-len"
            )
        if left <= block:
            raise PolicyError(
                f"tables and windows need {charges.fixed / GIB:.2f} GiB and only {available / GIB:.2f} GiB are free: "
                "lower --max-num-seqs or --max-model-len, or give the KV cache more memory"
            )
        logger.info(
            "KV policy memory: %.3f GiB for head pages, %.3f GiB for tables, query windows and workspace",
            left / GIB,
            arena / GIB,
        )
        return left

    def initialize_from_config(self, kv_cache_config: Any) -> Any:
        result = super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        layers = self.vllm_config.compilation_config.static_forward_context
        name = kv_cache_config.kv_cache_groups[0].layer_names[0]
        if self.runtime.geometry.page_dtype == FP8:
            attention = [layers[layer] for layer in kv_cache_config.kv_cache_groups[0].layer_names]
            if any((layer._k_scale_float, layer._v_scale_float) != (1.0, 1.0) for layer in attention):
                raise PolicyError(
                    "the checkpoint has scales for an FP8 KV cache, which --kv-policy does not apply: use "
                    "--kv-cache-dtype auto, or a checkpoint without them"
                )
        self.runtime.bind(layers[name].kv_cache, kv_cache_config.num_blocks)
        return result

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        self._counts.update(self.runtime.take_counts())
        if self._counts and compat.attach_stats(output, dict(self._counts)):
            self._counts.clear()
        return output

    def shutdown(self) -> None:
        super().shutdown()  # type: ignore[misc]
        if hasattr(self, "runtime"):
            self.runtime.close()

    def execute_model(self, scheduler_output: Any) -> Any:
        lifecycle = getattr(scheduler_output, ATTRIBUTE, None)
        if lifecycle is None:  # vLLM's warm-up makes up batches of its own: padding rows to us
            return super().execute_model(scheduler_output)  # type: ignore[misc]
        with torch.inference_mode():
            self.runtime.begin_step(lifecycle)
            if self.runtime.spares_gate:
                self.runtime.ask_gate(scheduler_output.num_scheduled_tokens, compat.tokens_before(scheduler_output))
            output = super().execute_model(scheduler_output)  # type: ignore[misc]
            self.runtime.end_step()
        return output


class PolicyWorker(PolicyWorkerMixin, Worker):
    """For CUDA."""
