"""The command `kvplug plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_kvplug import cli
from vllm_kvplug.commands.plan import server_defaults


def run(monkeypatch: pytest.MonkeyPatch, model: Path, *flags: str) -> None:
    arguments = ["plan", str(model), "--gpu-memory", "8", "--context", "1000", *flags]
    monkeypatch.setattr("sys.argv", ["kvplug", *arguments])
    cli.main()


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_model_dir: Path) -> Any:
    def plan(*flags: str) -> Any:
        run(monkeypatch, tiny_model_dir, "--json", *flags)
        return json.loads(capsys.readouterr().out)

    return plan


def test_json(planned: Any):
    """63 blocks hold 1,000 tokens and 32 half of them; the server's default is 256 requests."""
    result = planned("--policy", "snapkv@0.5")
    stock, ours = result["engines"]
    assert result["policy"] == {"name": "snapkv", "ratio": 0.5}
    assert (stock["policy"], stock["prompt_blocks"], stock["decode_blocks"]) == ("stock", 63, 63)
    assert (ours["policy"], ours["prompt_blocks"], ours["decode_blocks"]) == ("snapkv", 63, 32)
    assert result["max_num_seqs"] == 256 == stock["prompts"]
    assert result["dtype"] == "bfloat16"  # as vLLM runs weights in float32
    budget = int(8 * 0.92 * 2**30)
    assert result["kv_bytes_estimate"] == budget - result["weight_bytes_estimate"] - result["activation_bytes_estimate"]
    assert ours["table_bytes"] + ours["blocks"] * ours["block_bytes"] <= result["kv_bytes_estimate"]


def test_flags_change_what_they_name(planned: Any):
    base = planned("--policy", "snapkv")
    assert (
        planned("--policy", "snapkv", "--dtype", "float32")["engines"][0]["block_bytes"]
        == 2 * (base["engines"][0]["block_bytes"])
    )
    assert planned("--policy", "snapkv", "--tensor-parallel", "2")["weight_bytes_estimate"] == (
        base["weight_bytes_estimate"] // 2
    )
    fewer = planned("--policy", "snapkv", "--max-num-seqs", "5")
    assert fewer["engines"][1]["decoding"] == 5
    assert fewer["engines"][1]["charges"]["tables"] < base["engines"][1]["charges"]["tables"]


def test_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_model_dir: Path):
    monkeypatch.setenv("COLUMNS", "160")
    run(monkeypatch, tiny_model_dir, "--policy", 'streaming:{"window": 124}')
    shown = capsys.readouterr().out
    assert "streaming" in shown and "prompts of 1,000 tokens" in shown and "estimate" in shown
    (row,) = [line for line in shown.splitlines() if "of a request, after" in line and "blocks" in line]
    assert [cell.strip() for cell in row.split("│")][2:4] == ["63", "8"]
    assert "host memory" not in shown


@pytest.mark.parametrize(
    "flags, named",
    [
        (["--policy", "nope"], "--kv-policy nope"),
        (["--policy", "snapkv:[1]"], "--kv-policy-config"),
        (["--policy", 'snapkv:{"ratioo": 1}'], "ratioo"),
        (["--policy", "streaming@0.5"], "streaming@0.5"),
        (["--policy", "snapkv@half"], "half"),
        (["--policy", 'snapkv@0.5:{"ratio": 0.3}'], "ratio"),
        (["--policy", "snapkv", "--host-gib", "1"], "host_gib"),
        (["--policy", "heterocache"], "kvplug profile"),
        (["--policy", "snapkv", "--context", "5000"], "--context 5000"),
        (["--policy", "snapkv", "--tensor-parallel", "3"], "--tensor-parallel 3"),
        (["--policy", "snapkv", "--gpu-memory", "0.001"], "--gpu-memory 0.001"),
    ],
    ids=str,
)
def test_refusals(flags: list[str], named: str, monkeypatch: pytest.MonkeyPatch, tiny_model_dir: Path):
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, tiny_model_dir, *flags)
    message = str(caught.value)
    assert message.startswith("kvplug: ") and named in message and "\n" not in message


def test_defaults_of_the_server():
    assert server_defaults(24)[0] == 256 and server_defaults(80)[0] == 1024
