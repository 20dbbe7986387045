"""What the scheduler tells the workers about requests, once per step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_kvplug.options import RequestOptions

ATTRIBUTE = "kvplug_lifecycle"
"""Name under which a `Lifecycle` travels on vLLM's SchedulerOutput."""


@dataclass(frozen=True)
class Admission:
    """How a request begins, or begins anew after a preemption.

    tokens: of its prompt. For a request that was preempted these include the tokens it had generated.
    """

    tokens: int
    options: RequestOptions = RequestOptions()

    @property
    def prefill_end(self) -> int:
        """Tokens after which its prompt is cut: all of them, unless a context ends before."""
        return self.options.prefill_end(self.tokens)


@dataclass(frozen=True)
class Lifecycle:
    """Requests that begin or end with this step; ends come first.

    admitted: by request id. ended: finished, aborted and preempted requests.
    """

    admitted: dict[str, Admission] = field(default_factory=dict)
    ended: frozenset[str] = frozenset()
