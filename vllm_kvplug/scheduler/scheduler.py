"""vLLM's schedulers, telling the workers where requests begin and end."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_kvplug import compat
from vllm_kvplug.lifecycle import ATTRIBUTE, Lifecycle
from vllm_kvplug.options import RequestOptions, parse_options
from vllm_kvplug.scheduler.manager import HeadPageManager
from vllm_kvplug.system_prompt import SystemPrompt

OPTIONS = "kvplug_options"
"""Name under which a request's options are kept on vLLM's Request."""

UNPROTECTED = "not protected: no chat template shows where one begins and ends. Requests may ask for kvplug.protect"

logger = init_logger("vllm.kvplug.scheduler")


class _LifecycleMixin:
    """Binds the managers to the scheduler's requests and sends a `Lifecycle` with every step."""

    requests: dict[str, Any]
    kv_cache_manager: Any
    vllm_config: Any

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        managers = self.kv_cache_manager.coordinator.single_type_managers
        (self._head_pages,) = [m for m in managers if isinstance(m, HeadPageManager)]
        self._head_pages.requests = self.requests
        self._head_pages.options = self._options

        policy = self._head_pages.policy
        wanted = policy.evicts and policy.config.protect_system
        tokenizer = compat.tokenizer(self.vllm_config) if wanted else None
        self._system_prompt = SystemPrompt.of(tokenizer) if tokenizer is not None else None
        # vLLM's hook to end a prompt's chunk where a Mamba state is to be cached: here, where a prompt is to be cut.
        self.need_mamba_block_aligned_split = policy.evicts
        if wanted:
            logger.info("System prompts are %s.", "protected" if self._system_prompt else UNPROTECTED)

    def _options(self, request: Any) -> RequestOptions:
        """The options of a request, with its system prompt protected; they were checked at the door."""
        found = vars(request).get(OPTIONS)
        if found is None:
            params = request.sampling_params
            found = parse_options(params.extra_args if params is not None else None)
            system = self._system_prompt.find(request.prompt_token_ids or ()) if self._system_prompt else None
            found = found.protecting(system) if system and not found.off else found
            setattr(request, OPTIONS, found)
        return found

    def _mamba_block_aligned_split(self, request: Any, num_new_tokens: int, *computed_elsewhere: int) -> int:
        """So many tokens of a chunk that it does not go beyond a cut.

        None while a step is running whose cut gives back blocks that they would need: a request alone in a small pool
        would be preempted for lack of its own.
        """
        start = request.num_computed_tokens
        if request.num_in_flight_tokens:
            waits = self._head_pages.ends_context(request.request_id, start)
            if waits or self._head_pages.needs_cut(request.request_id, start, num_new_tokens):
                return 0
        room = self._head_pages.tokens_to_cut(request.request_id, start)
        return num_new_tokens if room is None else min(num_new_tokens, room)

    def make_stats(self, spec_decoding_stats: Any = None, kv_connector_stats: Any = None, *args: Any, **kwargs: Any):
        """Sends the workers' counts and the manager's to the front end; no KV connector is ever configured."""
        stats = super().make_stats(spec_decoding_stats, None, *args, **kwargs)  # type: ignore[misc]
        if stats is not None:
            compat.policy_stats(stats).update({**self._head_pages.gauges(), **(kv_connector_stats or {})})
        return stats

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output: SchedulerOutput = super().schedule(*args, **kwargs)  # type: ignore[misc]
        begun = [r.req_id for r in output.scheduled_new_reqs] + list(output.scheduled_cached_reqs.resumed_req_ids)
        admitted = {request_id: self._head_pages.admission(request_id) for request_id in begun}
        ended = output.finished_req_ids | (output.preempted_req_ids or set())
        setattr(output, ATTRIBUTE, Lifecycle(admitted, frozenset(ended)))
        return output


class PolicyScheduler(_LifecycleMixin, Scheduler):
    """For engines without async scheduling."""


class AsyncPolicyScheduler(_LifecycleMixin, AsyncScheduler):
    """For engines with async scheduling."""
