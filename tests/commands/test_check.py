"""The command `kvplug check`: every check can fail, and says what to change."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from vllm_kvplug import cli, compat, ops
from vllm_kvplug.commands import check, parity
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.planning import model_shape
from vllm_kvplug.policies.registry import make_policy
from vllm_kvplug.shape import ModelShape

EQUAL = [[1, 2], [3], [4], [5]]
DIFFERENT = [[1, 2], [3], [4], [6]]


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any]]:
    """Exit status and checks by name of a run in this process, whose engines are made up."""

    def run(*arguments: str, tokens: list[list[int]] = EQUAL) -> tuple[int, Any]:
        made_up = iter([EQUAL, tokens])
        monkeypatch.setattr(parity, "_run", lambda *_: next(made_up))
        monkeypatch.setattr(sys, "argv", ["kvplug", "check", "--json", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        result = json.loads(capsys.readouterr().out)
        assert result["ok"] == (caught.value.code == 0)
        return caught.value.code, {c["name"]: c for c in result["checks"]}

    return run


def test_a_real_run(tiny_model_dir: Path):
    """Two engines in processes of their own; the policy is SnapKV with everything kept."""
    command = [sys.executable, "-m", "vllm_kvplug.cli", "check", str(tiny_model_dir), "--policy", "snapkv@0.3"]
    # Other tests of this process set a size and a way of starting engines.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 8 and all(line.startswith("✓ ") for line in lines)
    assert lines[-1] == "✓ parity of snapkv: 80 greedy tokens equal stock vLLM's"


def test_a_token_that_differs(outcome: Any):
    assert outcome()[0] == 0
    status, found = outcome(tokens=DIFFERENT)
    assert status == 1 and not found["parity of streaming"]["ok"]
    assert "prompts of 300 tokens" in found["parity of streaming"]["detail"]


def test_an_engine_that_does_not_run(tmp_path: Path):
    with pytest.raises(PolicyError, match="stock vLLM does not run: .*nowhere"):
        parity._run(tmp_path / "nowhere", tmp_path, {})


@pytest.mark.parametrize(
    "flags, change",
    [
        (["--enable-lora"], "remove --enable-lora"),
        (["--enable-prefix-caching"], "remove --enable-prefix-caching"),
        (["--block-size", "32"], "remove --block-size 32"),
        (["--max-model-len", "100000"], "max_model_len"),
    ],
    ids=str,
)
def test_a_flag_that_is_refused(flags: list[str], change: str, outcome: Any, tiny_model_dir: Path):
    status, found = outcome(str(tiny_model_dir), "--", *flags)
    assert status == 1 and change in found["model"]["detail"]


def test_a_model_without_a_profile(outcome: Any, tiny_model_dir: Path):
    status, found = outcome(str(tiny_model_dir), "--policy", "heterocache")
    assert status == 1 and "kvplug profile" in found["model"]["detail"]
    assert found["parity of heterocache"]["ok"]


def test_every_refusal_of_a_model(tiny_model_dir: Path, tmp_path: Path):
    """Sliding windows are the model's, LoRA the flag's: both are told at once."""
    model = shutil.copytree(tiny_model_dir, tmp_path / "sliding")
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 128}
    (model / "config.json").write_text(json.dumps(config))
    found = compat.start_up_refusals(str(model), "snapkv", {}, ["--enable-lora"])
    assert len(found) == 2 and "sliding-window" in found[0] and "--enable-lora" in found[1]


def test_an_unsupported_vllm(outcome: Any, monkeypatch: pytest.MonkeyPatch):
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.31.9")
    status, found = outcome()
    assert status == 1 and "0.31.9" in found["vllm"]["detail"]


def test_no_vllm(outcome: Any, monkeypatch: pytest.MonkeyPatch):
    """What needs it is not tried."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    status, found = outcome()
    assert status == 1 and "pip install vllm" in found["vllm"]["detail"]
    assert "device" not in found and not any(name.startswith("parity") for name in found)


def test_entry_points(monkeypatch: pytest.MonkeyPatch):
    group, value = "vllm.general_plugins", "vllm_kvplug.plugin:register"
    assert value in check.entry_point(group, value)
    monkeypatch.setenv("VLLM_PLUGINS", "lora,other")
    with pytest.raises(PolicyError, match="VLLM_PLUGINS=lora,other"):
        check.entry_point(group, value)
    monkeypatch.setenv("VLLM_PLUGINS", "other,kvplug")
    assert value in check.entry_point(group, value)
    with pytest.raises(PolicyError, match="pip install"):
        check.entry_point(group, "vllm_kvplug.plugin:nothing")


def test_ops_that_cannot_be_built(outcome: Any, monkeypatch: pytest.MonkeyPatch):
    def fails() -> str:
        raise RuntimeError("The custom ops of vllm_kvplug could not be built.")

    monkeypatch.setattr(ops, "load_library", fails)
    status, found = outcome()
    assert status == 1 and "could not be built" in found["compiled ops"]["detail"]


@pytest.mark.parametrize("name", ["streaming", "snapkv", "random", "duo", "heterocache"])
def test_budgets_that_hold_everything(name: str, tmp_path: Path):
    model = parity.make_model(tmp_path / "model")
    given = {
        "snapkv": {"budget_tokens": 9, "window": 3},
        "streaming": {"window": 9, "sinks": 2},
        "duo": {"gates": "of-another-model.tsv"},
    }.get(name, {})
    knobs = parity.whole(name, given, model)
    policy = make_policy(name, knobs, ModelShape(layers=2, kv_heads=2, query_heads=4, head_dim=32))
    assert policy.plan().kept(parity.MAX_LEN) == [[parity.MAX_LEN] * 2] * 2
    assert {"snapkv": knobs.get("window") == 3, "streaming": knobs.get("sinks") == 2}.get(name, True)


@pytest.mark.parametrize(
    "name, given",
    [
        ("knorm", {"ratio": 0.2}),
        ("fastkvzip", {"decode_budget": 256}),
        ("fastkvzip+yakv", {"offload": 0.9}),
        ("wgkv", {}),
        ("wgkv+snapkv", {"queries": 9}),
        ("wgkv+yakv", {"cap": 0.5, "max_tokens": 99}),
    ],
)
def test_gates_that_let_everything_through(name: str, given: dict[str, Any], tmp_path: Path):
    """Whatever gate the user has: the tiny model gets one of its own."""
    model = parity.make_model(tmp_path / "model")
    knobs = parity.whole(name, given if name == "knorm" else {**given, "gate": "of-another-model.safetensors"}, model)
    shape = model_shape(AutoConfig.from_pretrained(model), "tiny", 1)
    plan = make_policy(name, knobs, shape).plan()
    assert plan.kept_tokens(parity.MAX_LEN) == parity.MAX_LEN * shape.heads
    assert plan.decode_blocks(300, parity.MAX_LEN) == parity.MAX_LEN // 16
    assert not name.startswith("wgkv") or knobs["tau"] == 0
