"""vLLM's schedulers, telling the workers where requests begin and end."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_kvplug.lifecycle import ATTRIBUTE, Lifecycle
from vllm_kvplug.scheduler.manager import HeadPageManager


class _LifecycleMixin:
    """Binds the managers to the scheduler's requests and sends a `Lifecycle` with every step."""

    requests: dict[str, Any]
    kv_cache_manager: Any

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        managers = self.kv_cache_manager.coordinator.single_type_managers
        (self._head_pages,) = [m for m in managers if isinstance(m, HeadPageManager)]
        self._head_pages.requests = self.requests

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output: SchedulerOutput = super().schedule(*args, **kwargs)  # type: ignore[misc]
        begun = [r.req_id for r in output.scheduled_new_reqs] + list(output.scheduled_cached_reqs.resumed_req_ids)
        admitted = {request_id: self._head_pages.prefill_end(request_id) for request_id in begun}
        ended = output.finished_req_ids | (output.preempted_req_ids or set())
        setattr(output, ATTRIBUTE, Lifecycle(admitted, frozenset(ended)))
        return output


class PolicyScheduler(_LifecycleMixin, Scheduler):
    """For engines without async scheduling."""


class AsyncPolicyScheduler(_LifecycleMixin, AsyncScheduler):
    """For engines with async scheduling."""
