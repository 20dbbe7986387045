"""The Grafana dashboard asks for metrics that a policy's engine exports, and shows all of ours."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from vllm_kvplug.metrics import COUNTERS, GAUGES, REFUSALS

prometheus = pytest.importorskip("prometheus_client")

DASHBOARD = json.loads((Path(__file__).parents[1] / "docs" / "grafana.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES = DASHBOARD["templating"]["list"]

OURS = {f"{name}_total" for name, *_ in [*COUNTERS.values(), REFUSALS]} | {name for name, *_ in GAUGES.values()}


def used(expression: str) -> dict[str, set[str]]:
    """Metrics of an expression, and the labels that each is selected by."""
    found = re.findall(r"(vllm:\w+)(?:{([^}]*)})?", expression)
    return {name: set(re.findall(r"(\w+)=", labels)) for name, labels in found}


EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]


@pytest.fixture(scope="module")
def exported(tiny_model_dir: Path) -> Any:
    """Labels of everything that the front end of an engine with a policy would show."""
    from vllm import EngineArgs
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    config = EngineArgs(model=str(tiny_model_dir), skip_tokenizer_init=True, kv_policy="snapkv").create_engine_config()
    PrometheusStatLogger(config, [0])
    samples = [s for family in prometheus.REGISTRY.collect() for s in family.samples if s.name.startswith("vllm:")]
    unregister_vllm_metrics()
    return {sample.name: set(sample.labels) for sample in samples}


def test_every_metric_is_exported(exported: dict[str, set[str]]):
    """With the labels by which it is selected."""
    queries = [variable["query"]["query"] for variable in VARIABLES if variable["type"] == "query"]
    for expression in [*EXPRESSIONS, *queries]:
        assert used(expression), expression
        for name, labels in used(expression).items():
            assert labels <= exported[name], f"{name} has no labels {labels - exported[name]}"


def test_every_metric_of_ours_is_shown(exported: dict[str, set[str]]):
    shown = {name for expression in EXPRESSIONS for name in used(expression)}
    assert OURS <= shown and OURS <= exported.keys()


def test_counters_are_rates():
    """A counter that is drawn as it is only ever rises; a gauge's rate means nothing."""
    for expression in EXPRESSIONS:
        (name,) = used(expression)
        assert name.endswith(("_total", "_bucket")) == ("rate(" in expression), expression


def test_panels_do_not_overlap():
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    for a, b in itertools.combinations(places, 2):
        apart_x = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        apart_y = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert apart_x or apart_y, f"{a} and {b}"
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)


def test_panels_say_what_they_show():
    for panel in PANELS:
        assert panel["title"] and panel["description"].endswith(".") and panel["fieldConfig"]["defaults"]["unit"]


def test_variables_are_known():
    names = {variable["name"] for variable in VARIABLES}
    assert set(re.findall(r"\$(?!__)\{?(\w+)", json.dumps(DASHBOARD["panels"]))) == names
