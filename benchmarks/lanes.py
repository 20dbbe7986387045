"""Scores of many engines in one result file, which every finished engine makes longer and a later call goes on with."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from benchmarks import report
from benchmarks.engine import Outcome, Turns, side_by_side
from vllm_kvplug.eval.scoring import interval, relative

if TYPE_CHECKING:
    from benchmarks.eval_tasks import Examination

Row = dict[str, Any]
FULL = "full"

MEASURED = ("stored_ratio", "host_bytes", "tpot_ms")
"""What a row has beside scores, and metrics have as it is."""


@dataclass(frozen=True)
class Found:
    """What one engine has shown.

    scores: of the examples. prompt_tokens: of an example, mean. counted: the policy's metrics. tpot_ms: see
    `decode_ms`, None if not asked for. Over the steps in which requests decode: held_bytes, of blocks and their page
    tables, per token of a request; host_bytes, reserved in the host tier, per request; stored_ratio, tokens that a head
    stores on average, of all tokens (None for stock vLLM).
    """

    scores: list[float]
    prompt_tokens: float
    held_bytes: float
    host_bytes: float
    stored_ratio: float | None
    tpot_ms: float | None
    counted: dict[str, float]


@dataclass(frozen=True)
class Lane:
    """One engine: a policy, or FULL, and the examination that it sits. key: of the examination in metrics' names."""

    key: str
    name: str
    policy: str | None
    knobs: dict[str, Any]
    examination: Examination

    @property
    def about(self) -> Row:
        """What a row must agree in to be this lane's."""
        knobs = {"policy": self.policy, "knobs": self.knobs} if self.policy else {}
        return {"key": self.key, "run": self.name, **knobs, "of": self.examination.about}


def full_lane(key: str, examination: Examination) -> Lane:
    """Full attention, which the others of this key are held against."""
    return Lane(key, FULL, None, {}, examination)


def measure(
    lanes: Sequence[Lane],
    out: Path,
    seconds: float | None = None,
    title: str | None = None,
    form: str = "{key}.{run}",
    derive: Callable[[list[Row], dict[str, float]], dict[str, float]] = lambda rows, metrics: {},
) -> None:
    """Add to `out` all lanes that are not in it yet, or those that end within `seconds`.

    form: of metrics' names. derive: more metrics, from rows and metrics. An engine that fails leaves a row with its
    error that a later call tries again. SystemExit if `out` holds something else under the name of a lane.
    """
    begun, rows = time.monotonic(), _rows(out)
    todo = [lane for lane in lanes if not _is_there(lane, rows, out)]
    names = {(lane.key, lane.name) for lane in todo}
    rows = [row for row in rows if (row["key"], row["run"]) not in names]  # failures that are tried again
    title = title or f"{lanes[0].key} {lanes[0].examination.dtype}"
    for lane in todo:
        lane.examination.asked  # noqa: B018  made here once, for all processes
    with tempfile.TemporaryDirectory() as folder:
        left = None if seconds is None else seconds - (time.monotonic() - begun)
        jobs = [partial(lane.examination.run, lane.policy, lane.knobs, Turns(folder)) for lane in todo]
        for number, outcome in side_by_side(jobs, lanes[0].examination.at_once, left):
            rows.append(row_of(todo[number], outcome))
            found = metrics(rows, form)
            found |= derive(rows, found)
            report.write(out, _joined(report.result(title, found, in_order(rows, lanes))))
            print(todo[number].key, todo[number].name, outcome.error or "is done", flush=True)


def row_of(lane: Lane, outcome: Outcome[Found]) -> Row:
    """A lane's row: mean scores by task, all scores in the order of the examples, and what else was measured."""
    if outcome.error is not None:
        return {**lane.about, "error": outcome.error[-600:]}
    assert outcome.value is not None
    found = asdict(outcome.value)
    names = task_names(lane.about["of"])
    means = {task: round(fmean(_of_task(task, names, found["scores"])), 4) for task in dict.fromkeys(names)}
    found["scores"] = [round(score, 4) for score in found["scores"]]
    return {**lane.about, **means, **found, "commit": report.COMMIT}


def metrics(rows: Iterable[Row], form: str) -> dict[str, float]:
    """Of all rows; what is relative to full attention needs its row of the same key."""
    done = [row for row in rows if "error" not in row]
    full = {row["key"]: row for row in done if row["run"] == FULL}
    found: dict[str, float] = {}
    for row in done:
        name, base = form.format(key=row["key"], run=row["run"]), full.get(row["key"])
        values = {"mean": fmean(row["scores"])}
        if base is not None and base is not row:
            names = task_names(row["of"])
            values["rel"] = relative(names, row["scores"], base["scores"])
            values["rel_low"], values["rel_high"] = interval(names, row["scores"], base["scores"])
            values["gpu_kv_ratio"] = row["held_bytes"] / base["held_bytes"]
        values |= {what: row[what] for what in MEASURED if row.get(what) is not None}
        found |= {f"{name}.{what}": value for what, value in values.items()}
        found[f"{row['key']}.examples"] = len(row["scores"])
    return found


def task_names(of: Row) -> list[str]:
    """The task of every example."""
    return [task for task in of["tasks"] for _ in range(of["examples"])]


def in_order(rows: list[Row], lanes: Sequence[Lane]) -> list[Row]:
    """Rows in the order of the lanes, those of other calls first."""
    places = {(lane.key, lane.name): place for place, lane in enumerate(lanes)}
    return sorted(rows, key=lambda row: places.get((row["key"], row["run"]), -1))


def _rows(out: Path) -> list[Row]:
    return json.loads(out.read_text())["rows"] if out.exists() else []


def _is_there(lane: Lane, rows: list[Row], out: Path) -> bool:
    same = [row for row in rows if (row["key"], row["run"]) == (lane.key, lane.name) and "error" not in row]
    if same and any(same[0].get(key) != value for key, value in lane.about.items()):
        raise SystemExit(f"{out} has {lane.name} at {lane.key} of other knobs or examples: choose another --out")
    return bool(same)


def _of_task(task: str, names: list[str], scores: list[float]) -> list[float]:
    return [score for name, score in zip(names, scores, strict=True) if name == task]


def _joined(result: dict[str, Any]) -> dict[str, Any]:
    """With the commits of all rows."""
    commits = dict.fromkeys(row["commit"] for row in result["rows"] if "commit" in row)
    return {**result, "commit": ", ".join(commits) or result["commit"]}
