"""The command `kvplug`, short of a running server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_kvplug import cli
from vllm_kvplug.policies.registry import BUILT_IN, policy_class

KVPLUG = [sys.executable, "-m", "vllm_kvplug.cli"]


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["kvplug", *arguments])
    cli.main()


def test_policies(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("COLUMNS", "200")
    run_main(monkeypatch, "policies")
    shown = capsys.readouterr().out
    for name in BUILT_IN:
        cls = policy_class(name)
        assert f"{name}: {(cls.__doc__ or '').splitlines()[0]}" in shown
        for knob, field in cls.Config.model_fields.items():
            assert knob in shown and (field.description or "")[:40] in shown


def test_one_policy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    run_main(monkeypatch, "policies", "streaming")
    shown = capsys.readouterr().out
    assert "streaming" in shown and "window" in shown and "snapkv" not in shown


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_policy_as_json_schema(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    jsonschema = pytest.importorskip("jsonschema")
    run_main(monkeypatch, "policies", name, "--json")
    schemas = json.loads(capsys.readouterr().out)
    assert list(schemas) == [name]
    schema = schemas[name]
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == set(policy_class(name).Config.model_fields)
    assert all(entry.get("description") for entry in schema["properties"].values())
    jsonschema.validate({"arena_gib": 0.5}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"nope": 1}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"arena_gib": -1}, schema)


def test_all_policies_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    run_main(monkeypatch, "policies", "--json")
    assert set(json.loads(capsys.readouterr().out)) == set(BUILT_IN)


def test_an_unknown_policy():
    done = subprocess.run([*KVPLUG, "policies", "nope"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    known = ", ".join(sorted(BUILT_IN))
    assert done.stderr == f"kvplug: --kv-policy nope: no such policy. Known policies: {known}.\n"


def test_the_script_is_installed():
    """`pip install` leaves `kvplug` beside the interpreter."""
    script = Path(sys.executable).parent / "kvplug"
    done = subprocess.run([script, "policies", "streaming", "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(json.loads(done.stdout)) == ["streaming"]


@pytest.mark.parametrize("arguments", [[], ["nope"], ["policies", "snapkv", "random"]], ids=str)
def test_wrong_usage(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        run_main(monkeypatch, *arguments)
    assert caught.value.code == 2
    assert "usage: kvplug" in capsys.readouterr().err


def test_help_names_every_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        run_main(monkeypatch, "--help")
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in ("serve", "policies", "profile", "plan", "check", "eval", "view"))


def test_serve_help_has_our_flags():
    """vLLM groups its help: without an argument it lists sections, of which ours is one."""
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run([*KVPLUG, "serve", "--help=kv-policy"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "--kv-policy NAME" in done.stdout and "--kv-policy-config JSON" in done.stdout
    assert "vllm_kvplug" in done.stdout or "kvplug policies" in done.stdout
