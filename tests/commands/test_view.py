"""The command `kvplug view`: from a saved record, and from an engine in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from view_tools import made_up

from vllm_kvplug import cli
from vllm_kvplug.view.record import Record


@pytest.fixture
def view(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """What the command says when it writes tmp_path / 'view.html'; what it dies of raises."""

    def run(*arguments: Any) -> str:
        page = str(tmp_path / "view.html")
        monkeypatch.setattr(sys, "argv", ["kvplug", "view", page, *map(str, arguments)])
        cli.main()
        return capsys.readouterr().out

    return run


def test_from_a_saved_record(view: Any, tmp_path: Path):
    saved = tmp_path / "record.json"
    saved.write_text(made_up().model_dump_json())
    again = tmp_path / "again.json"
    shown = view("--from", saved, "--record", again)
    assert "heterocache kept 50.0% of 10 prompt tokens over 6 heads" in shown
    assert "<h1" in (tmp_path / "view.html").read_text()
    assert Record.model_validate_json(again.read_text()) == made_up()


def test_a_picture(view: Any, tmp_path: Path):
    pytest.importorskip("matplotlib")
    saved = tmp_path / "record.json"
    saved.write_text(made_up().model_dump_json())
    view("--from", saved, "--png", tmp_path / "pictures")
    assert (tmp_path / "pictures" / "kept.png").read_bytes().startswith(b"\x89PNG")


WRONG: dict[str, tuple[list[str], str]] = {
    "nothing": ([], "give --model, --kv-policy and --prompt-file or --text; or --from FILE"),
    "no prompt": (["--model", "m", "--kv-policy", "snapkv"], "give --model"),
    "no such policy": (["--model", "m", "--kv-policy", "nope", "--text", "a"], "no such policy"),
    "no such knob": (["--model", "m", "--kv-policy", "snapkv", "--kv-policy-config", '{"a": 1}', "--text", "a"], "a: "),
    "two GPUs": (
        ["--model", "m", "--kv-policy", "snapkv", "--text", "a", "--engine", '{"tensor_parallel_size": 2}'],
        "remove tensor_parallel_size from --engine",
    ),
    "no answer": (["--model", "m", "--kv-policy", "snapkv", "--text", "a", "--max-tokens", "0"], "--max-tokens"),
    "no file": (["--from", "nowhere.json"], "nowhere.json"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_at_once(view: Any, case: str):
    arguments, words = WRONG[case]
    with pytest.raises(SystemExit) as caught:
        view(*arguments)
    assert str(caught.value).startswith("kvplug: ") and words in str(caught.value)


def test_a_file_that_is_no_record(view: Any, tmp_path: Path):
    saved = tmp_path / "record.json"
    saved.write_text('{"version": 1}')
    with pytest.raises(SystemExit, match=f"{saved.name} is no record of kvplug view: model: Field required"):
        view("--from", saved)


def test_an_engine(small_model_dir: Path, tmp_path: Path):
    """The small model's own tokenizer and chat template; its system prompt is protected."""
    page, saved = tmp_path / "view.html", tmp_path / "record.json"
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Caf\u00e9s in the <b>city</b> open at nine. " * 20 + "When do they open?")
    command = [sys.executable, "-m", "vllm_kvplug.cli", "view", str(page), "--model", str(small_model_dir)]
    command += ["--kv-policy", "snapkv@0.3", "--kv-policy-config", '{"window": 16}', "--prompt-file", str(prompt)]
    command += ["--chat", "--max-tokens", "4", "--record", str(saved)]
    # Other tests of this process set a size and a way of starting engines.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")} | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    record = Record.model_validate_json(saved.read_text())
    text = "".join(record.prompt)
    assert text.startswith("<|im_start|>system\n") and prompt.read_text() in text
    assert record.knobs == {"ratio": 0.3, "window": 16}
    assert {count for layer in record.counts() for count in layer} == {int(record.tokens * 0.3)}
    assert json.dumps(record.prompt[0])[1:-1].replace("<", "\\u003c").replace(">", "\\u003e") in page.read_text()


def test_a_saved_record_needs_no_engine(tmp_path: Path):
    """Neither vLLM nor torch."""
    saved = tmp_path / "record.json"
    saved.write_text(made_up().model_dump_json())
    code = "import sys; sys.modules['vllm'] = sys.modules['torch'] = None; from vllm_kvplug import cli; cli.main()"
    command = [sys.executable, "-c", code, "view", str(tmp_path / "view.html"), "--from", str(saved)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "kept 50.0%" in done.stdout, done.stderr[-2000:]
