"""The measurement of selection in whole engines: what returns, what is left out, and what is made of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_tools import one_thread  # noqa: F401
from kernel_tools import INTERPRETED, run_interpreted, starts_interpreter
from vllm.model_executor.models.llama import LlamaDecoderLayer

from benchmarks import yakv_engine
from benchmarks.gpu_engine import COMMON
from benchmarks.yakv_engine import PLAIN, Row, SetLines, measure, metrics, returning
from vllm_kvplug.selection import Layout
from vllm_kvplug.worker import selection

TOKENS, SELECTED, HEADS = 512, 16, 6
BLOCK = HEADS * 16 * 2 * 32 * 4
"""Bytes of 16 tokens of the tiny model in float32."""


def rows_of(model: Path, name: str, steps: int) -> list[Row]:
    common = COMMON | {"dtype": "float32", "max_num_seqs": 3, "max_num_batched_tokens": 256}
    return measure(str(model), common, name, TOKENS, 0.01, steps)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every step of a layer that was computed once prompts were left out."""
    found: list[int] = []
    forward, leave_out = LlamaDecoderLayer.forward, yakv_engine.leave_out_prompts

    def counting(self: Any, positions: Any, hidden: Any, residual: Any) -> Any:
        found.append(len(hidden))
        return forward(self, positions, hidden, residual)

    def from_now_on(llm: Any) -> None:
        leave_out(llm)
        found.clear()

    monkeypatch.setattr(LlamaDecoderLayer, "forward", counting)
    monkeypatch.setattr(yakv_engine, "leave_out_prompts", from_now_on)
    return found


def test_stock(tiny_model_dir: Path, computed: list[int]) -> None:
    rows = rows_of(tiny_model_dir, "stock.bf16", 3)
    assert set(computed) == {1, 3}
    assert [row["requests"] for row in rows] == [3, 1]
    assert all(row["tok_s"] > 0 and row["block_bytes"] % BLOCK == 0 for row in rows)
    assert rows[0]["blocks_of_one"] * rows[0]["block_bytes"] >= (TOKENS + 1) // 16 * BLOCK


@pytest.mark.skipif(not INTERPRETED, reason="selection in lines, on CPU tensors, in the interpreter")
@pytest.mark.parametrize("name, kept", [("yakv.60", 10 / SELECTED), ("yakv.0", 0.0)])
def test_what_returns(
    name: str, kept: float, tiny_model_dir: Path, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As much as was set, in every head; no prompt was attended to, and every prompt's end was that of the policy."""
    init = selection.TokenSelector.__init__

    def with_lines(self: Any, policy: Any, geometry: Any, pool: Any, tables: Any, *more: Any) -> None:
        init(self, policy, geometry, pool, tables, *more)
        self.lines = selection.SelectedLines(policy.landmarks(), self.landmarks, geometry, pool, tables, 3)

    monkeypatch.setattr(selection.TokenSelector, "__init__", with_lines)
    monkeypatch.setattr(yakv_engine, "WARM_UP", 1)  # the interpreter takes seconds a step
    rows = rows_of(tiny_model_dir, "yakv.60", 1)
    assert set(computed) == {1, 3}
    assert [row["requests"] for row in rows] == [3, 1]
    assert all(row["returning"] == 10 / SELECTED for row in rows)
    assert all(row["bytes_selected"] == SELECTED * HEADS * (2 * 16 + 4) for row in rows)
    # 64 local and 16 selected tokens, a page for the answer's first ones, and landmarks of 448 tokens, 408 a page
    assert (rows[0]["planned_blocks"], rows[0]["blocks_of_one"]) == (5 + 2, 5 + 1 + 2)
    assert selection.SelectedLines.__name__ == "SelectedLines"


@starts_interpreter
def test_interpreted() -> None:
    run_interpreted(__file__, "what_returns")


def test_windows_of_a_random_order() -> None:
    """Each has the set share of the one before, also where the order begins anew, and none is like the first."""
    for share in (0.6, 0.0, 1.0):
        lines: Any = SetLines.__new__(SetLines)
        lines.share, lines._chosen, lines._order = share, torch.zeros(0), torch.empty(0)
        layout = Layout(((900, 964),), 30, 900, 6, 4)
        turns = [set(lines._turn(layout).tolist()) for _ in range(80)]
        assert all(len(turn) == 30 and max(turn) < 900 for turn in turns)
        assert {len(one & other) for one, other in zip(turns, turns[1:], strict=False)} == {round(30 * share)}
        assert len(set().union(*turns)) == (30 if share == 1 else 900)
    with returning(None):
        assert selection.SelectedLines is not SetLines


def row(engine: str, requests: int, tok_s: float, **more: Any) -> Row:
    return {
        "engine": engine,
        "tokens": 65_536,
        "requests": requests,
        "tok_s": tok_s,
        "tpot_ms": 1e3 * requests / tok_s,
    } | more


BYTES = {"block_bytes": 100, "table_bytes_per_block": 10, "blocks_of_one": 410, "planned_blocks": 409}
ROWS = [
    row("stock.bf16", 12, 400.0),
    row("stock.bf16", 1, 125.0),
    row("stock.fp8", 24, 800.0),
    row("yakv.60", 30, 900.0, bytes_selected=1000, returning=0.6, **BYTES),
    row("yakv.60", 15, 1000.0, bytes_selected=1000, returning=0.6, **BYTES),
    row("yakv.60", 1, 200.0, bytes_selected=1000, returning=0.6, **BYTES),
    {"engine": "yakv.0", "error": "out of memory"},
]


def test_metrics() -> None:
    found = metrics(PLAIN, ROWS)
    wanted = {
        f"{PLAIN}.65536.throughput_vs_stock_bf16": 2.5,
        f"{PLAIN}.65536.throughput_vs_stock_fp8": 1.25,
        f"{PLAIN}.65536.requests": 15,
        f"{PLAIN}.65536x1.tpot_ms": 5.0,
        f"{PLAIN}.65536x1.stock_bf16.tpot_ms": 8.0,
        "gpu_bytes_per_token_ratio": 410 / 4096,
        "gpu_bytes_per_token_ratio_planned": 409 / 4096,
        "gpu_bytes_per_token_ratio_with_tables": 1.1 * 410 / 4096,
        "pcie.bytes_per_step": 1000,
        "pcie.bytes_per_step_resident_set": 400,
    }
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)
    assert not any("returning_0" in name for name in found) and f"{PLAIN}.65536x1.stock_fp8.tpot_ms" not in found
    other = metrics("qwen3-30b-a3b", ROWS)
    assert other["qwen3-30b-a3b.pcie.bytes_per_step"] == 1000
    assert not found.keys() & other.keys(), "files of two shapes could not be put together"
    assert metrics(PLAIN, ROWS[-1:]) == {}
