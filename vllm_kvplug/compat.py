"""Everything that depends on the version of vLLM, or on which of its two model runners is at work."""

from __future__ import annotations

import gc
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from pydantic import ValidationError

from vllm_kvplug import door, features
from vllm_kvplug.calibrate.profile import model_fingerprint
from vllm_kvplug.config import ADDITIONAL_KEY, explain
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.metrics import PolicyMetrics
from vllm_kvplug.options import OptionError, parse_options
from vllm_kvplug.placement import pool
from vllm_kvplug.policies.base import Policy
from vllm_kvplug.policies.registry import policy_from_json
from vllm_kvplug.rotary import rotary_angles
from vllm_kvplug.shape import ModelShape

if TYPE_CHECKING:
    from vllm_kvplug.worker.runtime import Runtime

SUPPORTED = ("0.32", "0.33")

WORKERS = {
    "vllm.v1.worker.gpu_worker.Worker": "vllm_kvplug.worker.worker.PolicyWorker",
    "vllm.v1.worker.cpu_worker.CPUWorker": "vllm_kvplug.worker.cpu_worker.PolicyCPUWorker",
}
"""vLLM's worker classes and the ones that carry a policy."""

IN_PROCESS = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Environment of a process of ours that runs one engine, quietly, with its scheduler in reach."""

_RUNTIMES: WeakValueDictionary[int, Runtime] = WeakValueDictionary()
"""Runtime of each engine in this process, by the identity of the engine's table of layers."""


def check_version(version: str) -> None:
    """PolicyError unless this vLLM is one the project is tested with."""
    if not version.startswith(tuple(f"{v}." for v in SUPPORTED)):
        raise PolicyError(
            f"vllm_kvplug supports vLLM {' and '.join(SUPPORTED)}; this is {version}. "
            "Install one of those, or remove --kv-policy."
        )


def attach_runtime(vllm_config: Any, runtime: Runtime) -> None:
    """Tie a runtime to its engine: two engines may share a process, and vLLM copies VllmConfig, which takes no
    attributes of ours, but every copy shares the dict in which the engine's layers register."""
    _RUNTIMES[id(vllm_config.compilation_config.static_forward_context)] = runtime


def runtime_or_none(vllm_config: Any) -> Runtime | None:
    """The runtime of an engine; None if it has no KV policy."""
    return _RUNTIMES.get(id(vllm_config.compilation_config.static_forward_context))


def runtime_of(vllm_config: Any) -> Runtime:
    runtime = runtime_or_none(vllm_config)
    if runtime is None:
        raise PolicyError("attention backend CUSTOM needs --kv-policy: it only works under a KV policy")
    return runtime


def request_ids(runner: Any, common_metadata: Any) -> list[str]:
    """Ids of the batch's live requests in row order; padding rows come after them."""
    if common_metadata.req_idx is not None:  # Model Runner V2
        return [runner.req_states.index_to_req_id[i] for i in common_metadata.req_idx.tolist()]
    return list(runner.input_batch.req_ids)


def tokens_before(scheduler_output: Any) -> dict[str, int]:
    """Of every request of a step, how many tokens it had before."""
    begun, going_on = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_cached_reqs
    found = {request.req_id: request.num_computed_tokens for request in begun}
    return found | dict(zip(going_on.req_ids, going_on.num_computed_tokens, strict=True))


def keep_from_decode_graphs(runner: Any, when: Callable[[], bool]) -> None:
    """Have a model runner take a batch for one with prompts, if `when()`, though its rows are of one token each."""
    if hasattr(runner, "gather_batch_req_state"):  # Model Runner V2
        gather = runner.gather_batch_req_state

        def gathered(*args: Any, **kwargs: Any) -> tuple[Any, int | None]:
            state, uniform_tokens = gather(*args, **kwargs)
            return state, None if when() else uniform_tokens

        runner.gather_batch_req_state = gathered
        return
    is_uniform = runner._is_uniform_decode

    def uniform(*args: Any, **kwargs: Any) -> bool:
        return not when() and is_uniform(*args, **kwargs)

    runner._is_uniform_decode = uniform


@lru_cache(maxsize=4096)
def layer_index(layer_name: str) -> int:
    """Index of an attention layer: the one number in its name."""
    (number,) = re.findall(r"(?<=\.)\d+(?=\.)", layer_name)
    return int(number)


def page_dtype(vllm_config: Any) -> torch.dtype:
    """What head pages hold under the engine's --kv-cache-dtype."""
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    return pool.page_dtype(kv_cache_dtype_str_to_dtype(vllm_config.cache_config.cache_dtype, vllm_config.model_config))


def model_shape(vllm_config: Any) -> ModelShape:
    """Attention geometry of the engine's model, equal on every rank and in every process."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    return ModelShape(
        layers=model.get_num_layers(parallel),
        kv_heads=model.get_total_num_kv_heads(),
        query_heads=model.hf_text_config.num_attention_heads,
        head_dim=model.get_head_size(),
        tensor_parallel=parallel.tensor_parallel_size,
        fingerprint=model_fingerprint(model.hf_text_config),
        name=str(model.model),
        rotary=rotary_angles(model.hf_text_config),
        page_itemsize=page_dtype(vllm_config).itemsize,
    )


def tokenizer(vllm_config: Any) -> Any:
    """The engine's tokenizer, or None if it works on token ids alone."""
    from vllm.tokenizers import cached_tokenizer_from_config

    model = vllm_config.model_config
    return None if model.skip_tokenizer_init else cached_tokenizer_from_config(model)


def has_policy(vllm_config: Any) -> bool:
    return ADDITIONAL_KEY in (vllm_config.additional_config or ())


_METRICS: list[PolicyMetrics] = []
"""Of the newest engine of this front end: where refusals are counted."""


def make_metrics(vllm_config: Any, engines: Sequence[int]) -> PolicyMetrics:
    _METRICS[:] = [PolicyMetrics(vllm_config.model_config.served_model_name, engines)]
    return _METRICS[0]


def attach_stats(output: Any, stats: dict[str, int]) -> bool:
    """Let counts ride on a step's output to the scheduler; False if this output takes none."""
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    for name in ("model_runner_output", "_model_runner_output"):  # with async scheduling: Model Runner V2, V1
        output = getattr(output, name, output)
    if not isinstance(output, ModelRunnerOutput) or output.kv_connector_output is not None or not output.req_ids:
        return False
    output.kv_connector_output = KVConnectorOutput(kv_connector_stats=stats)  # type: ignore[arg-type]
    return True


def policy_stats(scheduler_stats: Any) -> dict[str, int]:
    """Where a policy's counts lie in a SchedulerStats: a dictionary of integers that only LoRA uses."""
    return scheduler_stats.running_lora_adapters


def check_request(vllm_config: Any, prompt_len: int, params: Any) -> None:
    """Check a request's SamplingParams against the policy of its engine; raises what vLLM answers with HTTP 400."""
    model = vllm_config.model_config
    name = json.dumps(vllm_config.additional_config[ADDITIONAL_KEY], sort_keys=True)
    policy = policy_from_json(name, model_shape(vllm_config))
    longest = model.max_model_len if params.max_tokens is None else prompt_len + params.max_tokens
    try:
        longest, blocks = min(longest, model.max_model_len), vllm_config.cache_config.num_gpu_blocks
        door.check_request(policy, params.extra_args, prompt_len, longest, model.dtype.itemsize, blocks)
        _check_seed(policy, prompt_len, params)
    except OptionError as error:
        for metrics in _METRICS:
            metrics.refused.inc()
        raise _refusal()(str(error)) from None


def _check_seed(policy: Policy[Any], prompt_len: int, params: Any) -> None:
    """OptionError for a seed with which vLLM's CPU runner would die: in a prompt that comes in several chunks."""
    from vllm.platforms import current_platform

    if getattr(params, "seed", None) is None or not current_platform.is_cpu():
        return
    options = parse_options(params.extra_args)
    first = policy.for_request(options).plan().next_cut(options.prefill_end(prompt_len), 0)
    if first is not None and first < prompt_len:
        what = "kvplug.context_end" if first == options.context_end else "cut_every in --kv-policy-config"
        raise OptionError(
            f"vLLM on a CPU cannot take up a seed after a part of a prompt, and policy '{policy.name}' takes this "
            f"one in parts: remove seed, or raise {what}"
        )


@cache
def _refusal() -> type[ValueError]:
    """Any other ValueError in a request's beginning is an internal error (HTTP 500) to AsyncLLM."""
    from vllm.exceptions import VLLMValidationError

    return type("RequestRefused", (VLLMValidationError, OptionError), {})


def prompt_length(prompt: Any) -> int:
    """Tokens of a prompt in any of the forms that lead to an EngineCoreRequest, or of that request."""
    from vllm.utils import length_from_prompt_token_ids_or_embeds

    names = ("prompt_token_ids", "prompt_embeds")
    ids, embeds = (prompt.get(name) if isinstance(prompt, dict) else getattr(prompt, name) for name in names)
    return length_from_prompt_token_ids_or_embeds(ids, embeds)


@contextmanager
def llm(model: str, **arguments: Any) -> Iterator[Any]:
    """A vllm.LLM that is gone afterwards, with its memory and process groups."""
    from vllm import LLM, envs
    from vllm.distributed import cleanup_dist_env_and_memory

    engine = LLM(model, **arguments)
    try:
        yield engine
    finally:
        # Now, not when the caller's last reference goes: that would tear down the next engine's process groups.
        engine.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()
        if not envs.VLLM_ENABLE_V1_MULTIPROCESSING:  # it initialises CUDA, after which engines no longer start by fork
            cleanup_dist_env_and_memory()


def generate(
    llm: Any,
    prompts: Sequence[list[int]],
    max_tokens: Sequence[int],
    after_step: Callable[[int], None] = lambda finished: None,
    asked: Sequence[dict[str, Any]] = (),
    **options: Any,
) -> list[Any]:
    """Greedy completions of token-id prompts, submitted at once; options: of SamplingParams.

    after_step is told after every step how many requests have finished in it. asked: every prompt's `kvplug.*` options.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine, final = llm.llm_engine, RequestOutputKind.FINAL_ONLY
    own = [options | ({"extra_args": given} if given else {}) for given in asked or [{}] * len(prompts)]
    for i, (prompt, most, given) in enumerate(zip(prompts, max_tokens, own, strict=True)):
        params = SamplingParams(temperature=0, max_tokens=most, output_kind=final, **given)
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    results: dict[int, Any] = {}
    while engine.has_unfinished_requests():
        finished = {int(o.request_id): o.outputs[0] for o in engine.step() if o.finished}
        results |= finished
        after_step(len(finished))
    return [results[i] for i in range(len(prompts))]


class HeldMemory:
    """What decoding requests of an engine in this process hold, all steps taken together.

    room: tokens that their blocks have room for; tokens: that they have.
    """

    def __init__(self, llm: Any):
        self._scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self.room = self.tokens = 0

    def decoding(self) -> list[Any]:
        """vLLM's running requests whose prompts are complete, and have given back what their policy drops."""
        # Blocks go back in the step after the one that completed the prompt.
        return [request for request in self._scheduler.running if request.num_output_tokens >= 2]

    def look(self) -> None:
        """Call it after every step."""
        managers = self._scheduler.kv_cache_manager.coordinator.single_type_managers
        for request in self.decoding():
            rows = [(m.req_to_blocks[request.request_id], m.block_size) for m in managers]
            self.room += max(sum(not block.is_null for block in row) * size for row, size in rows)
            self.tokens += request.num_tokens

    @property
    def share(self) -> float:
        """Room relative to tokens; NaN if nothing was seen."""
        return self.room / self.tokens if self.tokens else math.nan


class OneRequest:
    """The only request of an engine in this process, and the worker's state, between steps."""

    def __init__(self, llm: Any):
        core = llm.llm_engine.engine_core.engine_core
        self._scheduler = core.scheduler
        self.runtime: Runtime = core.model_executor.driver_worker.worker.runtime

    @property
    def tokens(self) -> int | None:
        """Tokens of it that are in the cache; None once it has ended."""
        request = next(iter(self._scheduler.requests.values()), None)
        return None if request is None else request.num_computed_tokens

    @property
    def used_blocks(self) -> int:
        """Of vLLM's pool, without its null block."""
        pool = self._scheduler.kv_cache_manager.block_pool
        return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()


def versions(llm: Any) -> dict[str, str]:
    """Of everything that an engine's numbers may depend on."""
    from vllm_kvplug import __version__

    dtype = str(llm.llm_engine.vllm_config.model_config.dtype).removeprefix("torch.")
    installed = {"vllm_kvplug": __version__, "vllm": version(), "torch": torch.__version__}
    return {**installed, "device": platform(), "dtype": dtype}


def version() -> str:
    """Of the installed vLLM; PolicyError if it cannot be imported."""
    try:
        import vllm
    except ImportError as error:
        raise PolicyError(f"vLLM cannot be imported ({error}): pip install vllm==0.32.0") from None
    return vllm.__version__


def platform() -> str:
    """The device vLLM has found, in words; PolicyError if policies do not run on it."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return "CPU"
    if current_platform.is_cuda():
        return f"{torch.cuda.device_count()} x {current_platform.get_device_name()}"
    raise PolicyError(
        f"vLLM runs on {current_platform.device_name or 'no device'}: policies need CUDA or its CPU wheel"
    )


def start_up_refusals(model: str, policy: str, knobs: dict[str, Any], flags: Sequence[str]) -> list[str]:
    """Why `vllm serve model flags` would not start under a policy; no weights are loaded and no engine is started."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def arguments(*more: str) -> Any:
        parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
        return AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", model, *more, *flags]))

    stock = arguments()
    if stock.enable_prefix_caching is None:  # what a policy makes of vLLM's default
        stock.enable_prefix_caching = False
    try:
        found = features.refusals(stock.create_engine_config())
        if not found:
            arguments("--kv-policy", policy, "--kv-policy-config", json.dumps(knobs)).create_engine_config()
    except ValidationError as error:
        return [first_line(explain(error))]
    except (PolicyError, ValueError, OSError) as error:
        return [first_line(str(error))]
    return found


def first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def check_layer(
    alibi_slopes: Any, sliding_window: Any, logits_soft_cap: Any, attn_type: Any, sharing_target: Any
) -> None:
    """PolicyError for attention that head pages do not serve, found while the model is built."""
    for found, what in (
        (alibi_slopes, "ALiBi"),
        (sliding_window, "sliding-window layers"),
        (logits_soft_cap, "logit soft-capping"),
        (str(getattr(attn_type, "value", attn_type)) != "decoder", f"{attn_type} attention"),
        (sharing_target, "KV sharing between layers"),
    ):
        if found:
            raise PolicyError(f"--kv-policy: this model uses {what}, which head pages do not serve; remove --kv-policy")
