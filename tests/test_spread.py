"""Commands with --ray, on a local Ray of two processes, do what they do without."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from serve_tools import add_tokenizer, prompt_of

from vllm_kvplug import cli
from vllm_kvplug.calibrate.profile import ProfiledModel
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.eval import runner
from vllm_kvplug.eval.fidelity import Continuation
from vllm_kvplug.gates import run, train_sink, training
from vllm_kvplug.gates.files import load_gate
from vllm_kvplug.spread import Ranks, RaySpread, Spread, spread


@pytest.fixture(scope="module")
def workers() -> Iterator[Spread]:
    ray = pytest.importorskip("ray", reason="needs Ray: pip install 'vllm_kvplug[ray]'")
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with mock.patch.dict(os.environ, settings):
        ray.init(num_cpus=2, num_gpus=0, include_dashboard=False)
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # its processes cannot import a test
        yield spread("")
        ray.shutdown()


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_tokenizer(tiny_model_dir, tmp_path_factory.mktemp("spread") / "model")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": prompt_of(120, seed)}) + "\n" for seed in range(5)))
    return path


def kvplug(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["kvplug", *map(str, arguments)])
    cli.main()


# ------------------------------------------------------------------------------------------ the room


def test_parts():
    three = Spread()
    three.slots = 3
    assert three.parts("abcdefgh") == ["ab", "cde", "fgh"]
    assert three.parts("ab") == ["a", "b"]
    assert Spread().parts("ab") == ["ab"]


def test_this_process():
    assert list(Spread().each(divmod, [(7, 3), (9, 4)])) == [(0, (2, 1)), (1, (2, 1))]
    assert Spread().together(lambda ranks, x: (ranks, x), 5, "x") == (Ranks(0, 1), "x")
    tensor = torch.ones(2)
    Ranks().add_up([tensor])
    assert tensor.tolist() == [1, 1] and Ranks().agree("x")


def waiting(folder: Path, number: int) -> tuple[int, str]:
    """Of two jobs, the first ends after the second."""
    (folder / str(number)).touch()
    while number == 0 and not (folder / "1").exists():
        pass
    return number, os.getcwd()


def test_jobs_at_once(workers: Spread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert isinstance(workers, RaySpread) and (workers.slots, workers.device) == (2, "cpu")
    monkeypatch.chdir(tmp_path)
    assert workers.map(waiting, [(tmp_path, 0), (tmp_path, 1)]) == [(0, str(tmp_path)), (1, str(tmp_path))]


def failing(how: str) -> None:
    if how == "die":
        os.kill(os.getpid(), 9)
    raise PolicyError("remove --this") if how == "refuse" else ValueError("odd")


@pytest.mark.parametrize(
    "how, message",
    [("refuse", "^remove --this$"), ("raise", r"^a Ray task failed: ValueError\('odd'\)"), ("die", "^a Ray task died")],
)
def test_a_job_that_fails(workers: Spread, how: str, message: str):
    with pytest.raises(PolicyError, match=message):
        list(workers.each(failing, [(how,)]))


def summing(ranks: Ranks, lost: int | None) -> tuple[list[float], bool, bool]:
    tensor = torch.tensor([1.0, ranks.rank])
    ranks.add_up([tensor])
    if ranks.rank == lost:
        raise ValueError("lost")
    if lost is not None:
        ranks.add_up([tensor])
    return tensor.tolist(), ranks.agree("same"), ranks.agree(ranks.rank)


def test_ranks(workers: Spread):
    assert workers.together(summing, 5, None) == ([2, 1], True, False)
    with pytest.raises(PolicyError, match="lost"):  # and no rank waits for it
        workers.together(summing, 2, 1)


# ------------------------------------------------------------------------------------------ commands


def test_profile(workers: Spread, model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    profiles = []
    for name, flags in (("here", []), ("ray", ["--ray"])):
        out = tmp_path / f"{name}.json"
        kvplug(monkeypatch, "profile", model, "--texts", texts, "--length", 60, "--steps", 8, "--out", out, *flags)
        profiles.append(out.read_text())
    assert profiles[0] == profiles[1]


WGKV = ["--window", 8, "--length", 50, "--steps", 6, "--hidden", 16, "--batch", 4]
FASTKVZIP = ["--length", 120, "--steps", 6, "--batch", 60, "--chunk", 60, "--dim", 4]


@pytest.fixture
def gate_of(model: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def train(kind: str, out: Path, *flags: str) -> Any:
        options = WGKV if kind == "wgkv" else FASTKVZIP
        kvplug(monkeypatch, "train-gate", kind, model, "--texts", texts, *options, "--out", out, *flags)
        config = json.loads((model / "config.json").read_text())
        from transformers import LlamaConfig

        return load_gate(kind, out, ProfiledModel.of(LlamaConfig(**config), "tiny"))

    return train


def watched(owner: str, work: str, step: str, log: Path, stop: int, *job: Any) -> Any:
    """`work` of a module in another process; every call of `step` leaves a line, and the one after `stop` fails."""
    module = importlib.import_module(f"vllm_kvplug.gates.{owner}")
    steps = importlib.import_module(f"vllm_kvplug.gates.{'train_write' if step == 'write_step' else owner}")
    plain, done = getattr(steps, step), []

    def counted(*arguments: Any) -> Any:
        if len(done) == stop:
            raise RuntimeError("stopped")
        done.append(0)
        with log.open("a") as file:
            file.write("step\n")
        return plain(*arguments)

    with mock.patch.object(steps, step, counted):
        return getattr(module, work)(*job)


@pytest.mark.parametrize(
    "kind, owner, work, step, stop",
    [
        ("wgkv", run, "_train_write_gate", "write_step", 9),  # 4 steps of a rank's 2 sequences, and half of the next
        ("fastkvzip", train_sink, "_train_group", "sink_step", 5),
    ],
)
def test_train_gate(
    workers: Spread,
    gate_of: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    owner: Any,
    work: str,
    step: str,
    stop: int,
):
    """The gate of one process; and of a run that was stopped, and went on."""
    whole, metadata = gate_of(kind, tmp_path / "here.safetensors")
    monkeypatch.setattr(training.Checkpoint.__init__, "__defaults__", (2,))  # steps from one save to the next
    log, out = tmp_path / "log", tmp_path / "ray.safetensors"
    names = (owner.__name__.split(".")[-1], work, step, log)
    monkeypatch.setattr(owner, work, partial(watched, *names, stop))
    with pytest.raises(SystemExit, match=r"kvplug: a Ray task failed: RuntimeError\('stopped'\)"):
        gate_of(kind, out, "--ray")
    saved = {file.name for file in out.with_suffix(".training").iterdir()}
    assert saved == {"gate"} if kind == "wgkv" else saved & {"layers-0-2", "layers-2-3"}
    log.unlink()
    monkeypatch.setattr(owner, work, partial(watched, *names, -1))
    spreaded, again = gate_of(kind, out, "--ray")
    steps = len(log.read_text().splitlines())
    assert steps == 8 if kind == "wgkv" else steps < 12  # of 24, or of two groups' 6 each
    for name, value in metadata.results.items():
        assert again.results[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    for a, b in zip(whole.parameters(), spreaded.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-2)  # a file's matrices are bfloat16


class Known(runner.Engines):
    """Engines of which full attention knows every answer, a policy none, and one of them fails."""

    def answer(self, policy: str, examples: Any, label: str) -> runner.Answers:
        if "0.3" in policy:
            raise PolicyError(f"{label}: the engine failed")
        return runner.Answers([e.answer if policy == "full" else "" for e in examples], len(policy))

    def continue_text(self, policy: str, prompts: Any, tokens: int, label: str) -> list[Continuation]:
        return [Continuation([1, int(policy == "full")], [{1: -0.1}, {2: -0.1}]) for _ in prompts]


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path) -> Callable[..., Any]:
    """`kvplug eval` without and with --ray: results.json of both."""

    def run(*flags: Any) -> list[Any]:
        for name, more in (("here", []), ("ray", ["--ray"])):
            kvplug(monkeypatch, "eval", model, "--tasks", "kv", "--n", 2, *flags, "--out", tmp_path / name, *more)
        return [json.loads((tmp_path / name / "results.json").read_text()) for name in ("here", "ray")]

    return run


def test_eval(workers: Spread, both: Callable[..., Any], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Scores and fidelity; what is there is not run again; one failure is told, and the rest is kept."""
    (tmp_path / "text.txt").write_text(prompt_of(900, 0))
    flags = ["--tokens", "700,800", "--fidelity", tmp_path / "text.txt", "--policies"]
    monkeypatch.setattr(runner, "Engines", Known)
    here, there = both(*flags, "full,snapkv@0.5")
    assert here["runs"] == there["runs"] and len(here["runs"]) == 8
    assert (tmp_path / "here" / "table.md").read_text() == (tmp_path / "ray" / "table.md").read_text()
    out = ["--out", tmp_path / "ray", "--ray"]
    with pytest.raises(SystemExit, match="^kvplug: snapkv@0.3 [78]00 tasks: the engine failed$"):
        kvplug(monkeypatch, "eval", model, "--tasks", "kv", "--n", 2, *flags, "snapkv@0.3", *out)
    monkeypatch.setattr(RaySpread, "_finished", lambda self, tasks: iter(tasks))  # of which there are none
    assert both(*flags, "full,snapkv@0.5")[1] == there


def test_eval_with_an_engine(workers: Spread, both: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    engine = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 4}
    here, there = both("--tokens", 700, "--engine", json.dumps(engine), "--policies", "snapkv@0.5")
    assert here == there and here["runs"]["snapkv@0.5 700 tasks"]["memory"] < 0.6


# ------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "arguments",
    [
        ["eval", "MODEL", "--policies", "full", "--out", "OUT"],
        ["profile", "MODEL", "--texts", "TEXTS", "--out", "OUT"],
        ["train-gate", "wgkv", "MODEL", "--texts", "TEXTS", "--out", "OUT", "--batch", 2],
        ["train-gate", "fastkvzip", "MODEL", "--texts", "TEXTS", "--out", "OUT"],
    ],
    ids=lambda arguments: " ".join(map(str, arguments[:2])),
)
def test_without_ray(arguments: list, model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    named = {"MODEL": model, "TEXTS": texts, "OUT": tmp_path / "out"}
    with pytest.raises(SystemExit, match=r"kvplug: --ray needs Ray: pip install 'vllm_kvplug\[ray\]'"):
        kvplug(monkeypatch, *[named.get(argument, argument) for argument in arguments], "--ray")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["train-gate", "wgkv", "MODEL", "--texts", "x"], "give --batch"),
        (["train-gate", "fastkvzip", "MODEL", "--texts", "x", "--device", "cpu"], "remove --device"),
        (["eval", "MODEL", "--policies", "full", "--out", "x", "--server", "http://localhost:1"], "remove --ray or"),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else None,
)
def test_what_cannot_be_spread(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(SystemExit, match=message):
        kvplug(monkeypatch, *arguments, "--ray")
