"""What the scheduler tells the workers about requests, once per step."""

from __future__ import annotations

from dataclasses import dataclass, field

ATTRIBUTE = "kvplug_lifecycle"
"""Name under which a `Lifecycle` travels on vLLM's SchedulerOutput."""


@dataclass(frozen=True)
class Lifecycle:
    """Requests that begin or end with this step; ends come first.

    admitted: request id -> tokens after which its prompt is complete. For a request that was preempted
    these include the tokens it had generated. ended: finished, aborted and preempted requests.
    """

    admitted: dict[str, int] = field(default_factory=dict)
    ended: frozenset[str] = frozenset()
