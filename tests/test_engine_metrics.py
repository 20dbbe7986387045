"""Our metrics in step with the scheduler, and none of them beside an engine without a policy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cases import snapkv, streaming
from engine_tools import (
    Ask,
    one_thread,  # noqa: F401
    scheduler,
    serve,
    tiny_engine,
    token_ids,
)

from vllm_kvplug.metrics import PolicyMetrics

prometheus = pytest.importorskip("prometheus_client")


def ours(**labels: str) -> dict[str, float]:
    """Every kvplug sample with these labels that a front end of this process would show."""
    samples = [s for family in prometheus.REGISTRY.collect() for s in family.samples if "kvplug" in s.name]
    return {s.name: s.value for s in samples if s.labels.items() >= labels.items()}


def ask(length: int, **options: Any) -> Ask:
    extra = {f"kvplug.{name}": value for name, value in options.items()}
    return Ask(token_ids(length), 4, sampling={"extra_args": extra})


def kept_ratios(llm: Any, asks: list[Ask]) -> list[float]:
    """After each step of requests that run at once."""
    ratios: list[float] = []
    serve(llm, asks, lambda: ratios.append(ours()["vllm:kvplug_kept_ratio"]))
    assert not scheduler(llm).requests
    return ratios


CASES: dict[str, tuple[Any, Mapping[str, Any], float]] = {
    "the server's budget": (snapkv(0.3), {}, 60 / 200),
    "its own": (snapkv(0.3), {"budget": 0.1}, 20 / 200),
    "protected tokens on top": (snapkv(0.3), {"protect": [0, 90]}, 90 / 200),
    "off": (snapkv(0.3), {"off": True}, 1),
    "a ring": (streaming(window=46), {}, 50 / 200),
}


@pytest.fixture(scope="module")
def ratios(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    result = {}
    for policy in ("snapkv", "streaming"):
        cases = {name: case for name, case in CASES.items() if case[0].policy == policy}
        arguments = next(iter(cases.values()))[0].arguments(tiny_model_dir, tmp_path_factory.mktemp(policy))
        with tiny_engine(tiny_model_dir, disable_log_stats=False, **arguments) as llm:
            for name, (_, options, _) in cases.items():
                result[name] = kept_ratios(llm, [ask(200, **options)])
            if policy == "snapkv":
                result["together"] = kept_ratios(llm, [ask(150), ask(75, off=True)])
                metrics = ours()
                with pytest.raises(ValueError, match=r"kvplug\.budget"):
                    kept_ratios(llm, [ask(20, budget=2)])
                refused = "vllm:kvplug_refused_requests_total"
                result["refused"] = [ours()[refused] - metrics[refused]]
    with tiny_engine(tiny_model_dir, disable_log_stats=False) as llm:
        serve(llm, [ask(20)])
        names = {s.name for family in prometheus.REGISTRY.collect() for s in family.samples}
        assert "vllm:kv_cache_usage_perc" in names, "the comparison shows nothing"
        result["without a policy"] = list(ours().values())
    return result


@pytest.mark.parametrize("case", CASES)
def test_kept_ratio_while_a_request_decodes(ratios: dict[str, list[float]], case: str) -> None:
    """0 while its prompt is computed, and again when it has ended."""
    share = CASES[case][2]
    assert ratios[case] == pytest.approx([0, share, share, 0], abs=1e-5)


def test_kept_ratio_of_several(ratios: dict[str, list[float]]) -> None:
    """By tokens, not by requests."""
    share = (45 + 75) / (150 + 75)
    assert ratios["together"] == pytest.approx([0, share, share, 0], abs=1e-5)


def test_units_and_engines() -> None:
    """What workers and schedulers count comes out in the units of the metrics, for the engine that it came from."""
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    unregister_vllm_metrics()  # those of engines above, as a new engine does
    metrics = PolicyMetrics("tiny", [0, 3])
    counts = {"checks": 5, "late_microseconds": 1_500_000, "kept_ppm": 250_000, "host_used_bytes": 7}
    for _ in range(2):
        metrics.record({"kvplug.nobody_knows": 1, **{f"kvplug.{name}": count for name, count in counts.items()}}, 3)
    assert {name: value for name, value in ours(engine="3").items() if not name.endswith("_created")} == {
        "vllm:kvplug_drift_checks_total": 10,
        "vllm:kvplug_late_seconds_total": 3,
        "vllm:kvplug_kept_ratio": 0.25,
        "vllm:kvplug_host_used_bytes": 7,
        "vllm:kvplug_host_total_bytes": 0,
        **{f"vllm:kvplug_{name}_total": 0 for name in ("drift_triggers", "fetched_bytes", "landings", "late_landings")},
    }
    assert not any(value for name, value in ours(engine="0").items() if not name.endswith("_created"))
    unregister_vllm_metrics()


def test_refusals_are_counted_once(ratios: dict[str, list[float]]) -> None:
    assert ratios["refused"] == [1]


def test_an_engine_without_a_policy_has_none_of_them(ratios: dict[str, list[float]]) -> None:
    """Although one with a policy came before it in this process."""
    assert ratios["without a policy"] == []
