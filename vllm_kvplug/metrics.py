"""Prometheus metrics of a policy, beside vLLM's own and through its channel.

Workers count; their counts ride on the step's output to the scheduler, which adds what it knows and sends all of
it to the front end inside vLLM's SchedulerStats. There they become `vllm:kvplug_*` on /metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PREFIX = "kvplug."

COUNTERS = {
    "checks": ("vllm:kvplug_drift_checks", "Times a request's pivots were compared with their baselines.", 1.0),
    "triggers": ("vllm:kvplug_drift_triggers", "Pivots whose attention had drifted.", 1.0),
    "fetched_bytes": ("vllm:kvplug_fetched_bytes", "Bytes fetched from the host tier, on one rank.", 1.0),
    "landings": ("vllm:kvplug_landings", "Fetches whose tokens replaced older ones.", 1.0),
    "late_landings": ("vllm:kvplug_late_landings", "Fetches a step had to wait for.", 1.0),
    "late_microseconds": ("vllm:kvplug_late_seconds", "Time that steps waited for fetches.", 1e-6),
}
"""What workers count: name and help of the metric, and its unit in terms of ours."""

GAUGES = {
    "kept_ppm": (
        "vllm:kvplug_kept_ratio",
        "Share of their prompts' tokens that decoding requests kept, over all heads; 0 while none decodes.",
        1e-6,
    ),
    "host_used_bytes": ("vllm:kvplug_host_used_bytes", "Host tier bytes reserved by live requests, on one rank.", 1.0),
    "host_total_bytes": ("vllm:kvplug_host_total_bytes", "Size of the host tier, on one rank.", 1.0),
}
"""What the scheduler knows, likewise."""

REFUSALS = ("vllm:kvplug_refused_requests", "Requests refused for their kvplug options or for the host tier's size.")


class PolicyMetrics:
    """The metrics of one front end, for all of its engines."""

    def __init__(self, model_name: str, engines: Sequence[int]):
        from prometheus_client import Counter, Gauge

        def labelled(metric: Any) -> dict[int, Any]:
            return {engine: metric.labels(model_name, str(engine)) for engine in engines}

        names = ["model_name", "engine"]
        self._counters = {k: labelled(Counter(name, text, names)) for k, (name, text, _) in COUNTERS.items()}
        self._gauges = {
            k: labelled(Gauge(name, text, names, multiprocess_mode="mostrecent"))
            for k, (name, text, _) in GAUGES.items()
        }
        self.refused = Counter(*REFUSALS, ["model_name"]).labels(model_name)

    def record(self, stats: Mapping[str, int], engine: int) -> None:
        """Take over what came with a SchedulerStats of `engine`; keys that are not ours are left alone."""
        for key, (_, _, unit) in COUNTERS.items():
            if count := stats.get(PREFIX + key):
                self._counters[key][engine].inc(count * unit)
        for key, (_, _, unit) in GAUGES.items():
            if (value := stats.get(PREFIX + key)) is not None:
                self._gauges[key][engine].set(value * unit)
