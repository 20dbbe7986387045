"""Engines side by side, and what they leave in a result file."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import gate_sweep, lanes, policies_table, selection_sweep
from benchmarks.engine import Outcome, Turns, apart, decode_ms, side_by_side
from benchmarks.lanes import Found, Lane, full_lane, measure

# ------------------------------------------------------------------------------------------ processes


def test_jobs_end_in_any_order_and_fail_alone():
    jobs: list[Any] = [partial(pow, 2, 5), partial(int, "x"), partial(os._exit, 7), partial(pow, 3, 2)]
    found = dict(side_by_side(jobs, 3))
    assert (found[0].value, found[3].value) == (32, 9)
    assert "ValueError" in found[1].error and "exit code 7" in found[2].error
    with pytest.raises(RuntimeError, match="ValueError"):
        apart(jobs[1])


def test_what_has_not_ended_in_time_is_left_out():
    begun = time.monotonic()
    found = dict(side_by_side([partial(pow, 2, 5), partial(time.sleep, 300), partial(pow, 3, 2)], 2, seconds=45))
    assert {0, 2} == found.keys() and time.monotonic() - begun < 120


def test_turns(tmp_path: Path):
    """Whoever is timed waits for those at work, and comes before those that want to begin."""
    turns, told, may_end = Turns(tmp_path), [], threading.Event()

    def work(name: str, until: threading.Event) -> None:
        with turns.together():
            told.append(name)
            until.wait(10)
            told.append(f"{name} ends")

    def timed() -> None:
        with turns.alone():
            told.append("timed")

    def begin(target: Any, *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments)
        thread.start()
        time.sleep(0.2)
        return thread

    at_once = threading.Event()
    at_once.set()
    threads = [begin(work, "a", may_end), begin(work, "b", may_end), begin(timed), begin(work, "late", at_once)]
    assert told == ["a", "b"]
    may_end.set()
    for thread in threads:
        thread.join(20)
    assert set(told[2:4]) == {"a ends", "b ends"} and told[4:] == ["timed", "late", "late ends"]


def test_a_process_that_was_forked_meanwhile_holds_nobody_up(tmp_path: Path):
    """vLLM may fork an engine's process, which then has the lock's file open for as long as it lives."""
    turns, done = Turns(tmp_path), threading.Event()

    def timed() -> None:
        with turns.alone():
            done.set()

    with turns.together():
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
    try:
        threading.Thread(target=timed, daemon=True).start()
        assert done.wait(20)
    finally:
        child.kill()
        child.join()


def test_time_per_token_counts_from_the_last_prompt_on():
    early = SimpleNamespace(first_token_ts=1.0, last_token_ts=9.0)
    late = SimpleNamespace(first_token_ts=3.0, last_token_ts=9.4)
    assert decode_ms([early, late, early], 65) == pytest.approx(100)


# ------------------------------------------------------------------------------------------ result files


@dataclass(frozen=True)
class Examined:
    """An examination of two tasks, whose scores and bytes are those of its knobs."""

    seed: int = 0
    at_once: int = 1
    dtype: str = "float32"
    asked = ()

    @property
    def about(self) -> dict[str, Any]:
        return {"tasks": ["kv", "drift"], "examples": 2, "seed": self.seed}

    def run(self, policy: str | None, knobs: dict[str, Any], turns: Turns) -> Found:
        if knobs.get("fails"):
            raise ValueError("no such budget")
        share = knobs.get("ratio", 1.0)
        scores = [1.0, 1.0, share, share]
        return Found(scores, 10.0, 400 * share, 7.0, None if policy is None else share, 2.5, {})


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Knobs of the engines that ran, in this process."""
    found: list[str] = []

    def here(jobs: list[Any], at_once: int, seconds: float | None = None) -> Any:
        for number, job in enumerate(jobs):
            found.append(str(job.args[:2]))
            try:
                yield number, Outcome(job())
            except ValueError as error:
                yield number, Outcome(None, str(error))

    monkeypatch.setattr(lanes, "side_by_side", here)
    return found


def lanes_at(*ratios: float, seed: int = 0, **knobs: Any) -> list[Lane]:
    examined: Any = Examined(seed)
    some = [Lane("eval9", f"snapkv@{ratio:g}", "snapkv", {"ratio": ratio, **knobs}, examined) for ratio in ratios]
    return [full_lane("eval9", examined), *some]


def test_metrics_of_lanes(ran: list[str], tmp_path: Path):
    measure(lanes_at(0.5), tmp_path / "x.json", form="{run}.{key}")
    content = json.loads((tmp_path / "x.json").read_text())
    found = {k.removeprefix("snapkv@0.5.eval9."): v for k, v in content["metrics"].items() if "snapkv" in k}
    assert found == {
        "mean": 0.75,
        "rel": 0.75,
        "rel_low": 0.75,
        "rel_high": 0.75,
        "gpu_kv_ratio": 0.5,
        "stored_ratio": 0.5,
        "host_bytes": 7.0,
        "tpot_ms": 2.5,
    }
    assert content["metrics"]["full.eval9.mean"] == 1 and content["metrics"]["eval9.examples"] == 4
    (row,) = [row for row in content["rows"] if row["run"] == "snapkv@0.5"]
    assert (row["kv"], row["drift"], row["knobs"]) == (1, 0.5, {"ratio": 0.5})


def test_a_call_goes_on_with_the_file_of_another(ran: list[str], tmp_path: Path):
    """More runs join those that are there; failures are tried again; other examples are refused."""
    out = tmp_path / "x.json"
    measure(lanes_at(0.25, fails=True), out)
    assert "error" in json.loads(out.read_text())["rows"][1] and len(ran) == 2
    measure(lanes_at(0.25), out)
    measure(lanes_at(0.5, 0.25), out)
    assert len(ran) == 4 and "0.5" in ran[3]
    content = json.loads(out.read_text())
    assert [row["run"] for row in content["rows"]] == ["full", "snapkv@0.5", "snapkv@0.25"]
    assert content["metrics"]["eval9.snapkv@0.25.rel"] == 0.625
    for other in (lanes_at(0.5, seed=1), lanes_at(0.5, window=8)):
        with pytest.raises(SystemExit, match="choose another --out"):
            measure(other, out)


# ------------------------------------------------------------------------------------------ levels


@pytest.mark.parametrize("name", policies_table.compared())
@pytest.mark.parametrize("level", [0.5, 0.25])
@pytest.mark.parametrize("tokens", [1024, 8192])
def test_knobs_keep_about_the_level(name: str, level: float, tokens: int, monkeypatch: pytest.MonkeyPatch):
    """By the policy's own plan for the small model: the level, unless heads that it keeps whole take more."""
    from vllm_kvplug.calibrate.profile import HeadProfile
    from vllm_kvplug.policies.registry import make_policy
    from vllm_kvplug.shape import ModelShape

    profile = HeadProfile.load(Path("profiles/smollm2-kv.json"))
    monkeypatch.setattr(policies_table, "profile_of", lambda model, given: profile)
    angles = tuple(500_000 ** (-i / 32) for i in range(32))
    shape = ModelShape(30, 3, 9, 64, fingerprint=profile.model.fingerprint, rotary=angles)
    ((policy, knobs),) = policies_table.runs_of([name], [level], tokens, "any").values()
    found = make_policy(policy, knobs, shape)
    if policy == "rkv":  # prompts are whole until the first cut of an answer
        kept = found.cuts(tokens).decode.budget / tokens
    elif policy in ("quest", "wgkv+quest"):  # the level is what a query attends to, of what is stored
        kept = 16 * found.attended_pages(tokens) / tokens
    elif policy == "streaming":
        kept = found.ring.tokens / tokens
    else:
        kept = found.plan().kept_tokens(tokens) / (tokens * shape.heads)
    if policy in ("fastkvzip+yakv", "wgkv+yakv"):  # landmarks of what is on the host take pages
        kept += 16 * found.plan().layout(tokens).landmark_blocks / tokens
    wanted = max(level, profile.smallest_rho if policy == "heterocache" else 0)
    if policy == "wgkv+yakv" and tokens == 1024 and level == 0.25:
        wanted = 304 / 1024  # the window, the fewest tokens to select, and landmarks are more
    if policy == "duo" and tokens == 1024 and level == 0.25:
        wanted = 384 / 1024  # the ends that all heads keep are more
    assert kept == pytest.approx(wanted, abs=0.02)


# ------------------------------------------------------------------------------------------ gates


def test_thresholds_by_what_they_admit():
    """The best of the runs that admit, or store, no more than a share, of the shipped gate; none where all do."""
    rows = [
        {"key": "eval4096", "run": f"tau{tau}", "policy": "wgkv", "knobs": {"tau": tau / 100}, "stored_ratio": stored}
        | {"prompt_tokens": 2560.0, "scores": [score]}
        for tau, stored, score in [(10, 0.4, 0.9), (30, 0.28, 0.8), (31, 0.29, 0.7), (50, 0.25, 0.6), (90, 0.19, 0.5)]
    ]
    other = {**rows[-1], "run": "tight_tau10", "knobs": {"tau": 0.1, "gate": "tight.safetensors"}, "scores": [1.0]}
    rows.append(other)
    metrics = {f"eval4096.{row['run']}.stored_ratio": row["stored_ratio"] for row in rows}
    found = gate_sweep.admission_metrics([*rows, {"key": "eval4096", "run": "full"}], metrics)
    assert (found["eval4096.stored30.stored_ratio"], found["eval4096.stored30.tau"]) == (0.28, 0.3)
    assert found["eval4096.stored30.admitted"] == found["eval4096.tau30.admitted"] == pytest.approx(0.2)
    assert (found["eval4096.admit30.tau"], found["eval4096.admit15.tau"]) == (0.3, 0.9)  # 40% stored: a third admitted
    assert not any("stored15" in name for name in found)


def test_the_sweep_is_what_gates_are_held_against():
    assert "kvzip_40" not in gate_sweep.runs_of(4096, "any", {}, None)
    runs = gate_sweep.runs_of(4096, "any", {"tight": "tight.safetensors"}, Path("scores"))
    assert runs["tight_tau10"] == ("wgkv", {"tau": 0.1, "gate": "tight.safetensors"})
    assert runs["kvzip_40"] == ("oracle", {"ratio": 0.4, "scores": "scores"})
    assert {"keep40", "keep30", "keep20", "tau05", "tau90", "snapkv_40", "snapkv_30", "streaming_30"} <= runs.keys()
    assert runs["streaming_30"] == ("streaming", {"window": 1225}) and runs["snapkv_15"] == ("snapkv", {"ratio": 0.15})


# ------------------------------------------------------------------------------------------ selection


def test_the_sweep_of_selection():
    """Every run starts, with the landmarks that its name says, and selects the share that it says."""
    from vllm_kvplug.policies.registry import make_policy
    from vllm_kvplug.shape import ModelShape

    shape = ModelShape(30, 3, 9, 64, rotary=tuple(500_000 ** (-i / 32) for i in range(32)))
    selected = {"1_6": 128, "3": 256, "6": 512}
    landmarks = {"yakv": "higgs2", "residual": "residual", "shadowkv_landmarks": "means8"}
    runs = selection_sweep.runs_of()
    assert runs.keys() == {f"{name}_{percent}" for name in [*landmarks, "quest"] for percent in selected}
    for percent, tokens in selected.items():
        assert make_policy(*runs[f"quest_{percent}"], shape).attended_pages(8192) == tokens / 16
        for name, form in landmarks.items():
            found = make_policy(*runs[f"{name}_{percent}"], shape)
            assert (found.selection.landmarks, found.plan().layout(8192).selected) == (form, tokens)
