"""Entry points into vLLM, and the one list of everything we register with it or patch in it."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from vllm_kvplug import compat
from vllm_kvplug.config import ADDITIONAL_KEY, CONFIG_FLAG, FLAG, parse_knobs, read_knobs, split_request
from vllm_kvplug.door import longest_request
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.features import check_config
from vllm_kvplug.policies.base import Policy
from vllm_kvplug.policies.registry import make_policy, policy_class
from vllm_kvplug.shape import PAGE


@dataclass(frozen=True)
class Seam:
    """One place where we meet vLLM."""

    where: str
    how: str
    why: str
    upstream: str


SEAMS = (
    Seam(
        "AttentionBackendEnum.CUSTOM",
        "registry: register_backend",
        "attention over head pages; selected per engine by attention_backend='CUSTOM'",
        "none needed",
    ),
    Seam(
        "KVCacheSpecRegistry",
        "registry: register(HeadPageSpec, HeadPageManager)",
        "blocks of a request follow the page plan",
        "none needed",
    ),
    Seam(
        "SchedulerConfig.scheduler_cls, ParallelConfig.worker_cls",
        "config fields",
        "requests' beginnings and ends reach the worker; the worker makes the spec and charges its tables",
        "none needed",
    ),
    Seam(
        "Scheduler._mamba_block_aligned_split, need_mamba_block_aligned_split",
        "overridden in our scheduler, only for policies that cut prompts",
        "a prompt's chunk ends where the prompt is cut; stock vLLM's is for Mamba states, which are refused",
        "a hook of the KV cache manager that limits a request's chunk",
    ),
    Seam(
        "QKVParallelLinear",
        "registry: PluggableLayer.register_oot, only once an engine's gate reads hidden states",
        "multiplies what enters the attention with the gate's matrix; engines without such a gate compute as before",
        "hidden states as an argument of the attention layer",
    ),
    Seam(
        "GPUModelRunner.gather_batch_req_state, of Model Runner V1 _is_uniform_decode",
        "patch of an engine's runner: compat.keep_from_decode_graphs, only for gates that answers do without",
        "captured decode steps leave the gate out; a prompt's chunk of one token that needs a score must not be one",
        "a hook that keeps a step from full graphs",
    ),
    Seam(
        "EngineArgs.__init__, add_cli_args, from_cli_args",
        "patch: add_policy_arguments",
        "vLLM has no hook for new flags or keyword arguments",
        "a plugin group for engine arguments; until then additional_config works without this patch",
    ),
    Seam(
        "EngineArgs.create_engine_config",
        "patch: add_policy_arguments",
        "lower the policy to stock fields, and refuse what cannot be served before weights load",
        "a plugin hook that sees EngineArgs and the finished VllmConfig",
    ),
    Seam(
        "InputProcessor.process_inputs",
        "patch: check_requests_at_the_door, only once an engine has a policy",
        "a bad kvplug.* option, or a request that the host tier can never hold, is refused with a reason (HTTP 400)",
        "a hook that sees request and VllmConfig (Platform.validate_request sees no config)",
    ),
    Seam(
        "AsyncLLM.generate",
        "patch: check_requests_at_the_door, only once an engine has a policy",
        "the same, before a stream begins: its first step comes when the client has already got HTTP 200",
        "process inputs when generate is called, not when its first output is asked for",
    ),
    Seam(
        "PrometheusStatLogger.__init__, record",
        "patch: publish_metrics, only once an engine has a policy",
        "vllm:kvplug_* on /metrics; the stat logger plugin group would turn statistics on for engines without a policy",
        "stat logger plugins that can decline an engine",
    ),
    Seam(
        "ModelRunnerOutput.kv_connector_output, SchedulerStats.running_lora_adapters",
        "fields: compat.attach_stats, compat.policy_stats",
        "the way of counts from worker to scheduler to front end; both are unused, since KV connectors and LoRA are "
        "refused",
        "a free-form field for plugins in both messages",
    ),
    Seam(
        "CpuPlatform.get_attn_backend_cls",
        "patch: honour_custom_backend_on_cpu",
        "the CPU platform ignores the selected backend",
        "resolve registered backends on the CPU as on CUDA",
    ),
)

_MARK = "_kvplug_arguments"

RENDERED = ("token", "embeds")
"""Types of prompts that are ready for an engine; the server renders every prompt before it calls one."""


def register() -> None:
    """Entry point `vllm.general_plugins`: runs in the front end, the engine core and every worker.

    Nothing here changes an engine without a policy.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from vllm_kvplug.scheduler.manager import HeadPageManager
    from vllm_kvplug.scheduler.spec import HeadPageSpec

    register_backend(AttentionBackendEnum.CUSTOM, "vllm_kvplug.worker.backend.HeadPageBackend")
    # The registry fills itself only while empty: registering first would lose every built-in spec.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(HeadPageSpec, HeadPageManager, uniform_type_base_spec=FullAttentionSpec)
    honour_custom_backend_on_cpu()
    arguments = sys.modules.get("vllm.engine.arg_utils")
    if arguments is not None and hasattr(arguments, "EngineArgs"):
        add_policy_arguments(arguments)


def honour_custom_backend_on_cpu() -> None:
    """Let the CPU platform use CUSTOM where an engine selects it."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    platform: Any = type(current_platform)
    if not current_platform.is_cpu() or hasattr(platform, _MARK):
        return
    stock = platform.get_attn_backend_cls.__func__

    def get_attn_backend_cls(cls: Any, selected_backend: Any, *args: Any, **kwargs: Any) -> str:
        if selected_backend is AttentionBackendEnum.CUSTOM:
            return AttentionBackendEnum.CUSTOM.get_path()
        return stock(cls, selected_backend, *args, **kwargs)

    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
    setattr(platform, _MARK, True)


def add_policy_arguments(module: ModuleType) -> None:
    """Give EngineArgs the keywords `kv_policy`, `kv_policy_config`, their flags, and the lowering."""
    base, derived = module.EngineArgs, getattr(module, "AsyncEngineArgs", None)
    if hasattr(base, _MARK):
        return
    setattr(base, _MARK, True)
    for cls in filter(None, (base, derived)):
        cls.__init__ = _init_with_policy(cls.__init__)
    add_cli_args, from_cli_args = base.add_cli_args, base.from_cli_args.__func__
    create_engine_config = base.create_engine_config

    @functools.wraps(add_cli_args)
    def add_cli_args_and_ours(parser: Any) -> Any:
        parser = add_cli_args(parser)
        _add_flags(parser)
        return parser

    @functools.wraps(from_cli_args)
    def from_cli_args_and_ours(cls: Any, args: Any) -> Any:
        engine_args = from_cli_args(cls, args)
        engine_args.kv_policy = getattr(args, "kv_policy", None)
        engine_args.kv_policy_config = getattr(args, "kv_policy_config", None)
        return engine_args

    @functools.wraps(create_engine_config)
    def create_engine_config_with_policy(self: Any, *args: Any, **kwargs: Any) -> Any:
        lowered = lower(self)
        vllm_config = create_engine_config(self, *args, **kwargs)
        if lowered:
            install_policy(vllm_config)
        return vllm_config

    base.add_cli_args = staticmethod(add_cli_args_and_ours)
    base.from_cli_args = classmethod(from_cli_args_and_ours)
    base.create_engine_config = create_engine_config_with_policy


def check_requests_at_the_door() -> None:
    """Let the front end refuse what the policy of its engine cannot serve."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor

    if hasattr(InputProcessor, _MARK):
        return
    setattr(InputProcessor, _MARK, True)
    process_inputs, generate = InputProcessor.process_inputs, AsyncLLM.generate

    @functools.wraps(process_inputs)
    def process_inputs_and_check(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = process_inputs(self, *args, **kwargs)
        if compat.has_policy(self.vllm_config) and request.sampling_params is not None:
            compat.check_request(self.vllm_config, compat.prompt_length(request), request.sampling_params)
        return request

    @functools.wraps(generate)
    def check_and_generate(self: Any, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        if compat.has_policy(self.vllm_config) and isinstance(prompt, dict) and prompt.get("type") in RENDERED:
            compat.check_request(self.vllm_config, compat.prompt_length(prompt), sampling_params)
        return generate(self, prompt, sampling_params, *args, **kwargs)

    setattr(InputProcessor, process_inputs.__name__, process_inputs_and_check)
    setattr(AsyncLLM, generate.__name__, check_and_generate)


def publish_metrics() -> None:
    """Let vLLM's Prometheus logger show the policy's metrics beside its own."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger as Logger

    if hasattr(Logger, _MARK):
        return
    setattr(Logger, _MARK, True)
    init, record = Logger.__init__, Logger.record

    @functools.wraps(init)
    def init_with_ours(self: Any, vllm_config: Any, engine_indexes: Any = None) -> None:
        init(self, vllm_config, engine_indexes)  # unregisters what an earlier engine registered, ours too
        engines = [0] if engine_indexes is None else engine_indexes
        self.kvplug = compat.make_metrics(vllm_config, engines) if compat.has_policy(vllm_config) else None

    @functools.wraps(record)
    def record_with_ours(self: Any, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
        record(self, scheduler_stats, *args, **kwargs)
        metrics = getattr(self, "kvplug", None)  # a stock engine may have been there before the first policy was
        if metrics is not None and scheduler_stats is not None:
            metrics.record(compat.policy_stats(scheduler_stats), kwargs.get("engine_idx", 0))

    setattr(Logger, init.__name__, init_with_ours)
    setattr(Logger, record.__name__, record_with_ours)


def _init_with_policy(init: Any) -> Any:
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, kv_policy: Any = None, kv_policy_config: Any = None, **kwargs: Any) -> None:
        self.kv_policy, self.kv_policy_config = kv_policy, kv_policy_config
        init(self, *args, **kwargs)

    return __init__


def _add_flags(parser: Any) -> None:
    group = parser.add_argument_group(
        title="KV policy",
        description="What is written to, read from and dropped from the KV cache, per attention head (vllm_kvplug).",
    )
    group.add_argument(
        FLAG, default=None, metavar="NAME", help="KV-cache policy; `kvplug policies` lists them with their knobs."
    )
    group.add_argument(
        CONFIG_FLAG, default=None, type=_knobs_flag, metavar="JSON", help="Knobs of the policy, as a JSON object."
    )


def _knobs_flag(text: str) -> dict[str, Any]:
    try:
        return read_knobs(text)
    except PolicyError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def lower(engine_args: Any) -> bool:
    """Turn the policy arguments into stock fields, once, in the front end. False if there is no policy."""
    # vLLM also allows an object that can only be hashed; it cannot hold our key.
    given = engine_args.additional_config
    additional = dict(given) if isinstance(given, Mapping) else {}
    name, knobs = getattr(engine_args, "kv_policy", None), getattr(engine_args, "kv_policy_config", None)
    if name is None and knobs is not None:
        raise PolicyError(f"{CONFIG_FLAG} needs {FLAG}")
    if name is not None:
        request = {"name": name, **read_knobs({} if knobs is None else knobs)}
        if additional.get(ADDITIONAL_KEY, request) != request:  # the same where these arguments were lowered before
            raise PolicyError(f"give the policy once: {FLAG}, or additional_config['{ADDITIONAL_KEY}']")
        if given and not additional:
            raise PolicyError(f"{FLAG} needs a dict as additional_config, not a {type(given).__name__}")
        additional[ADDITIONAL_KEY] = request
    if ADDITIONAL_KEY not in additional:
        return False
    import vllm

    compat.check_version(vllm.__version__)
    name, knobs = split_request(additional[ADDITIONAL_KEY])
    parse_knobs(policy_class(name).Config, name, knobs)
    additional[ADDITIONAL_KEY] = {"name": name, **knobs}
    if engine_args.enable_prefix_caching:
        raise PolicyError(f"{FLAG} cannot share compressed blocks between requests: remove --enable-prefix-caching")
    if engine_args.block_size not in (None, PAGE):
        raise PolicyError(f"{FLAG} needs blocks of {PAGE} tokens: remove --block-size {engine_args.block_size}")
    if engine_args.attention_backend not in (None, "CUSTOM"):
        raise PolicyError(f"{FLAG} brings its own attention backend: remove --attention-backend")
    for field, flag in (("scheduler_cls", "--scheduler-cls"), ("worker_cls", "--worker-cls")):
        if getattr(engine_args, field) not in (None, "auto"):
            raise PolicyError(f"{FLAG} brings its own scheduler and worker: remove {flag}")
    engine_args.additional_config = additional
    engine_args.enable_prefix_caching = False
    engine_args.block_size = PAGE
    engine_args.attention_backend = "CUSTOM"
    return True


def install_policy(vllm_config: Any) -> None:
    """Check a finished config against the policy, and put our scheduler and worker in."""
    check_config(vllm_config)
    name, knobs = split_request(vllm_config.additional_config[ADDITIONAL_KEY])
    policy = make_policy(name, knobs, compat.model_shape(vllm_config))
    worker = vllm_config.parallel_config.worker_cls
    if worker not in compat.WORKERS:
        raise PolicyError(f"{FLAG} does not run on this platform (worker {worker}): it needs CUDA or CPU")
    vllm_config.parallel_config.worker_cls = compat.WORKERS[worker]
    check_requests_at_the_door()
    publish_metrics()
    kind = "AsyncPolicyScheduler" if vllm_config.scheduler_config.async_scheduling else "PolicyScheduler"
    vllm_config.scheduler_config.scheduler_cls = f"vllm_kvplug.scheduler.scheduler.{kind}"
    _log_plan(vllm_config, policy)


def _log_plan(vllm_config: Any, policy: Policy[Any]) -> None:
    from vllm.logger import init_logger

    logger = init_logger("vllm.kvplug")
    length = vllm_config.model_config.max_model_len
    plan = policy.plan()
    logger.info(
        "KV policy %s: %s. A prompt of %d tokens takes %d blocks while it is computed and %d after.",
        policy.name,
        policy.summary(),
        length,
        plan.prompt_blocks(length),
        plan.decode_blocks(length, length),
    )
    if not policy.offloads:
        return
    itemsize = vllm_config.model_config.dtype.itemsize
    need, capacity = policy.host_slots(length), policy.host_capacity(itemsize)
    logger.info(
        "Host tier: %.2f GiB per rank, as much as %.1f requests of %d tokens need.",
        policy.config.host_gib,
        capacity / max(need, 1),
        length,
    )
    longest = longest_request(policy, length, itemsize)
    if longest < length:
        logger.warning(
            "Requests that may grow beyond %d tokens will be refused: the host tier cannot hold them. Raise host_gib "
            "in %s%s.",
            longest,
            CONFIG_FLAG,
            ", or set it to 0, which turns retrieval off" if policy.retrieval else "",
        )
