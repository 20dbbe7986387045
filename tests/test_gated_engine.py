"""The measurement of policies with gates in whole engines: what their gates let through, and what is made of rows."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_tools import one_thread  # noqa: F401
from vllm.v1.core.block_pool import BlockPool

from benchmarks.engine import Turns
from benchmarks.gated_engine import Row, measure, metrics, share, write
from benchmarks.gpu_engine import COMMON

TOKENS, WINDOW, CUT_EVERY = 2400, 256, 1024


@pytest.fixture
def rows_of(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[Row]]:
    """Measures an engine of the tiny model."""
    monkeypatch.setattr(BlockPool, "get_new_blocks", BlockPool.get_new_blocks)  # to have it back afterwards
    common = COMMON | {"dtype": "float32", "max_num_seqs": 4}
    yield lambda name: measure(str(tiny_model_dir), common, name, [TOKENS], 4, 1, CUT_EVERY, Turns(tmp_path))
    del BlockPool.most_used


def test_wgkv(rows_of: Callable[[str], list[Row]]) -> None:
    """The gate lets through of each head what `synthetic` keeps of it, or everything, and the cap holds."""
    (stock,), (control,), (gated, capped, drawn) = map(rows_of, ("bf16", "synthetic wgkv", "wgkv"))
    assert stock["blocks"] == -(-TOKENS // 128) and control["blocks"] == -(-TOKENS // 16)
    for row in (gated, drawn):
        pairs = list(zip(row["tokens_of_heads"], control["tokens_of_heads"], strict=True))
        assert all(abs(mine - max(its, WINDOW)) < 0.02 * TOKENS for mine, its in pairs)
    result = metrics("wgkv", [stock, gated, capped, drawn, control])
    assert result[f"stored.{TOKENS}"] == pytest.approx(0.2, abs=0.02)
    assert result["cap.stored"] * TOKENS == pytest.approx(WINDOW + 0.2 * (TOKENS - WINDOW), abs=2)
    planned = WINDOW + 0.2 * (CUT_EVERY - WINDOW) + CUT_EVERY  # when the second cut comes
    assert 0 <= result["cap.blocks"] * 16 - planned < 4 * 16
    assert capped["blocks"] == gated["blocks"] and capped["tokens_of_heads"] != gated["tokens_of_heads"]


def test_fastkvzip(rows_of: Callable[[str], list[Row]]) -> None:
    (gated,), (control,) = map(rows_of, ("fastkvzip", "synthetic fastkvzip"))
    assert share(gated) == pytest.approx(0.3, abs=0.001) == share(control)
    assert gated["tokens_of_heads"][-1] > 2 * gated["tokens_of_heads"][0]


def row(engine: str, variant: str, tokens: int, prefill_s: float, tpot_ms: float, blocks: int, stored: int) -> Row:
    size = 2 if engine == "bf16" else 1  # stock's blocks may be larger
    made = {"engine": engine, "variant": variant, "tokens": tokens, "prefill_s": prefill_s, "tpot_ms": tpot_ms}
    made |= {"blocks": blocks, "block_bytes": 100 * size, "table_bytes_per_block": 10}
    return made | ({} if engine == "bf16" else {"tokens_of_heads": [stored, 3 * stored]})


ROWS = [
    row("bf16", "", 1000, 6.0, 8.0, 50, 0),
    row("bf16", "", 2000, 12.0, 9.0, 100, 0),
    row("wgkv", "", 1000, 2.0, 5.05, 30, 100),
    row("wgkv", "", 2000, 3.0, 6.0, 50, 200),
    row("wgkv", "cap", 1000, 2.2, 5.0, 32, 110),
    row("wgkv", "no gate", 1000, 1.6, 5.0, 30, 100),
    row("synthetic wgkv", "", 1000, 6.1, 5.0, 100, 101),
    row("synthetic wgkv", "", 2000, 12.1, 5.0, 200, 200),
    {"engine": "fastkvzip", "error": "out of memory"},
]


def test_metrics(tmp_path: Path) -> None:
    found = metrics("wgkv", ROWS)
    wanted = {
        "prefill.1000.speedup_vs_bf16": 3,
        "prefill.2000.speedup_vs_bf16": 4,
        "prefill.1000.peak_kv_ratio": 0.3,
        "prefill.1000.peak_kv_ratio_with_tables": 0.33,
        "decode.1000x1.tpot_ms": 5.05,
        "decode.1000x1.bf16_tpot_ms": 8,
        "decode.1000x1.synthetic_tpot_ms": 5,
        "stored.1000": 0.2,
        "stored.1000.synthetic": 0.202,
        "gate.tpot_overhead": 0.01,
        "gate.prefill_overhead": 0.25,
        "cap.blocks": 32,
        "cap.peak_kv_ratio": 0.32,
        "cap.stored": 0.22,
    }
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)
    assert metrics("fastkvzip", ROWS) == {} and "gate.tpot_overhead" not in metrics("wgkv", ROWS[:6])
    write(tmp_path, ["wgkv", "fastkvzip"], ROWS[:3])
    assert [path.name for path in tmp_path.iterdir()] == ["wgkv.json"]
    write(tmp_path, ["wgkv", "fastkvzip"], ROWS)
    assert "error" in json.loads((tmp_path / "fastkvzip.json").read_text())["rows"][-1]


def test_a_part_of_the_policys_result_file(tmp_path: Path) -> None:
    """No metric has the name of one that is there."""
    write(tmp_path, ["wgkv"], ROWS)
    results = Path(__file__).parents[1] / "benchmarks" / "results"
    before = json.loads((results / "wgkv.json").read_text())
    (tmp_path / "before.json").write_text(json.dumps(before | {"metrics": no_engines(before["metrics"])}))
    parts = [str(tmp_path / "before.json"), str(tmp_path / "wgkv.json")]
    command = [sys.executable, "-m", "benchmarks.collect", "wgkv", *parts, "--out", str(tmp_path / "all.json")]
    subprocess.run(command, check=True, cwd=results.parents[1])
    whole = json.loads((tmp_path / "all.json").read_text())["metrics"]
    assert {"sparse_prefill.16384.speedup", "gate.tpot_overhead"} <= whole.keys()


def no_engines(found: dict[str, float]) -> dict[str, float]:
    """Without what a result file already has of this measurement."""
    return {name: value for name, value in found.items() if name not in metrics("wgkv", ROWS)}
