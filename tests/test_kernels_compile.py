"""The Triton kernels compile for an H100 or H200; that needs no GPU. What they compute is tested elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
pytest.importorskip("triton.backends.nvidia")

from vllm_kvplug.kernels import (  # noqa: E402
    append,
    decode_attention,
    fetches,
    landmark_scores,
    page_scores,
    pivot_scores,
    prefill_attention,
    sparse_prefill,
    token_selection,
    top_tokens,
    write_gate,
)

INTEGERS = {
    "directory": "*i32",
    "chunks": "*i32",
    "row_slot": "*i32",
    "lengths": "*i32",
    "work": "*i32",
    "starts": "*i32",
    "split_log2": "*i32",
    "blocks": "*i32",
    "positions": "*i32",
    "scores": "*fp32",
    "admitted": "*i1",
    "columns": "*i32",
    "ranks": "*i32",
    "earlier_sums": "*fp32",
    "position": "*i64",
    "frequencies": "*fp32",
    "threshold": "fp32",
    "free_chunks": "*i32",
    "left": "*i32",
    "place": "*i64",
    "slots": "*i64",
    "last": "*i64",
    "num_free": "*i64",
    "taken": "*i64",
    "first_row": "*i64",
    "num_left": "*i64",
    "scale": "fp32",
    "logits": "*fp32",
    "norm": "*fp32",
    "heads": "*i64",
    "partial": "*fp32",
    "sums": "*fp32",
    "out_starts": "*i32",
    "values": "*i32",
    "wanted": "*i32",
    "counts": "*i32",
    "state": "*i32",
    "above": "*i32",
    "ids": "*i32",
    "weights": "*fp32",
    "page_bytes": "*u8",
    "page_halves": "*fp16",
    "coarse": "*i32",
    "fine": "*i64",
    "landmarks": "*i32",
    "excluded": "*i32",
    "selected": "*i32",
    "stay": "*i32",
    "chosen": "*i32",
    "fresh": "*i32",
    "list_starts": "*i32",
    "host_slots": "*i64",
    "source": "*i64",
    "target": "*i64",
    "number": "*i32",
    "attended": "*i32",
    "pages": "*i32",
}
TENSORS = ("out", "query", "key", "value", "pool", "earlier", "norm_pre", "norm_rope", "w1", "b1", "w2", "b2", "bounds")
PAGES = {"PAGE": 16, "CHUNK": 64}


def attention(dtype: str, dim: int) -> list[tuple[Any, dict[str, Any]]]:
    shape = {"GROUP": 4, "D": dim}
    keys = 64 if dim <= 128 else 32
    return [
        (decode_attention._attend_kernel, {"HEADS": 8, **shape, "GROUP_PAD": 16, "BLOCK": keys, **PAGES}),
        (decode_attention._reduce_kernel, {"HEADS": 8, **shape, "SPLITS": 16}),
        *(
            (
                prefill_attention._prefill_attention_kernel,
                {**shape, "QUERIES": 64, "KEYS": keys, "RING": ring, **PAGES},
            )
            for ring in (True, False)
        ),
        (pivot_scores._logits_kernel, {"QUERIES": 24, "QUERIES_PAD": 32, "D": dim, "KEYS": keys, **PAGES}),
    ]


def promises(dim: int) -> tuple[Any, dict[str, Any]]:
    sizes = {"HEADS": 8, "GROUP": 4, "D": dim, "PARTS": 128, "BLOCK": page_scores.BLOCK, "MOST": page_scores.MOST}
    return page_scores._page_scores_kernel, {**sizes, **PAGES, "LOCAL": 16}


def sparse(dtype: str, dim: int, group: int) -> list[tuple[Any, dict[str, Any]]]:
    queries, rows, keys = sparse_prefill.tile(group, dim, torch.float32 if dtype == "fp32" else torch.bfloat16)
    constants = {"GROUP": group, "D": dim, "QUERIES": queries, "TILE": rows, "KEYS": keys, **PAGES}
    return [
        (sparse_prefill._sparse_prefill_kernel, {**constants, "CONTINUES": continues}) for continues in (True, False)
    ]


TABLES = [
    (decode_attention._plan_kernel, {"HEADS": 8, "ITEMS": 2048, "SHORTEST": 7, "LONGEST": 20}),
    (decode_attention._inverse_kernel, {"STEPS": 12, "BLOCK": 128}),
    (pivot_scores._pool_kernel, {"GROUP": 4, "WIDTH": 5, "TOKENS": 1024}),
    (fetches._fetches_kernel, {"HOST_SLOT": 64, "TOKENS": 2048, **PAGES}),
    (append._append_kernel, {"HEADS": 90, "HEADS_PAD": 128, **PAGES}),
]


SELECTING = (landmark_scores._landmark_scores_kernel, token_selection._misses_kernel)

UNALIGNED = (
    *("first_head", "earlier_first", "earlier_tokens", "column_stride", "sinks", "admitted_token_stride"),
    *("tokens", "out_token_stride"),
)
"""Numbers that may be anything: the others, and pointers, are multiples of 16 where models have usual sizes."""


def compile_for_hopper(
    kernel: Any, constants: dict[str, Any], dtype: str, pages: str | None = None, aligned: bool = False, warps: int = 4
) -> Any:
    """aligned: as Triton compiles a kernel for the arguments that it usually gets."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if kernel is fetches._fetches_kernel and name in ("positions", "target", "rows", "rank", "columns"):
            return "*i64"
        if name == "rows":  # block tables here, a description of prompt rows or a count there
            return "i32" if kernel is decode_attention._plan_kernel else "*i32"
        if name == "pool":
            return f"*{pages or dtype}"
        if name == "out" and kernel is write_gate._write_gate_kernel:
            return "*fp32"
        if name == "out" and kernel is top_tokens._write_kernel:
            return "*i32"
        if kernel in SELECTING and name in ("position", "blocks"):
            return "*i64"
        if kernel is landmark_scores._landmark_scores_kernel and name == "query":
            return "*fp32"
        return f"*{dtype}" if name in TENSORS else INTEGERS.get(name, "i32")

    signature = {name: kind(name) for name in kernel.arg_names}
    loose = {*constants, *UNALIGNED} | {name for name in signature if signature[name] == "fp32"}
    attributes = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if aligned and name not in loose
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


@pytest.mark.parametrize("dtype, dim", [("bf16", 64), ("bf16", 128), ("fp16", 256), ("fp32", 32)])
def test_attention_compiles(dtype: str, dim: int) -> None:
    for kernel, constants in attention(dtype, dim):
        assert compile_for_hopper(kernel, constants, dtype).asm["cubin"]


@pytest.mark.parametrize("dtype, dim", [("bf16", 64), ("bf16", 128), ("fp32", 256)])
def test_page_scores_compile(dtype: str, dim: int) -> None:
    widen = page_scores._widen_kernel, {"HEADS": 8, "D": dim, "PAGE": 16}
    for kernel, constants in (promises(dim), widen):
        assert compile_for_hopper(kernel, constants, dtype, aligned=True).asm["cubin"]


def test_attention_over_e4m3_compiles() -> None:
    for kernel, constants in attention("bf16", 128):
        assert compile_for_hopper(kernel, constants, "bf16", pages="fp8e4nv").asm["cubin"]


@pytest.mark.parametrize("dtype, dim, group", [("bf16", 64, 3), ("bf16", 128, 4), ("bf16", 256, 8), ("fp32", 64, 3)])
def test_sparse_prefill_compiles(dtype: str, dim: int, group: int) -> None:
    """For tensor cores, and with nothing spilled to memory, where the shape is a usual one."""
    for kernel, constants in sparse(dtype, dim, group):
        compiled = compile_for_hopper(kernel, constants, dtype, aligned=True, warps=sparse_prefill.WARPS)
        assert compiled.metadata.shared <= 227 * 1024
        if dtype == "bf16" and dim <= 128:
            assert "HGMMA" in compiled.asm["sass"] and "STL" not in compiled.asm["sass"]


@pytest.mark.parametrize("tokens", [16, 64])
@pytest.mark.parametrize("dtype, dim, hidden", [("bf16", 64, 256), ("bf16", 128, 512), ("fp32", 64, 256)])
def test_write_gate_compiles(dtype: str, dim: int, hidden: int, tokens: int) -> None:
    constants = {"D": dim, "HALF": dim // 2, "HIDDEN": hidden, "UNITS": write_gate.UNITS, "TOKENS": tokens}
    compiled = compile_for_hopper(write_gate._write_gate_kernel, constants, dtype, aligned=True)
    assert compiled.metadata.shared <= 227 * 1024
    assert dtype == "fp32" or "MMA" in compiled.asm["sass"]


def test_tables_compile() -> None:
    for kernel, constants in TABLES:
        assert compile_for_hopper(kernel, constants, "bf16").asm["cubin"]


@pytest.mark.parametrize("parts", [1, top_tokens.MOST_PARTS])
def test_radix_selection_compiles(parts: int) -> None:
    sizes = {"HEADS": 8, "UNIT": 240, "PARTS": parts, "BLOCK": top_tokens.BLOCK, "DIGITS": top_tokens.DIGITS}
    for level in range(top_tokens.LEVELS):
        compiled = compile_for_hopper(
            top_tokens._count_kernel, {**sizes, "LEVEL": level}, "fp32", aligned=True, warps=8
        )
        assert "STL" not in compiled.asm["sass"]
    for values in ({}, {"values": None}):
        constants = {**sizes, "OUT_UNIT": 16, **values}
        assert compile_for_hopper(top_tokens._write_kernel, constants, "fp32", aligned=True, warps=8).asm["cubin"]


@pytest.mark.parametrize("dim, tokens", [(64, 224), (128, 240)])
@pytest.mark.parametrize("name", ["higgs2", "residual", "means8"])
def test_selection_from_the_host_compiles(name: str, dim: int, tokens: int) -> None:
    heads = {"HEADS": 8, "GROUP": 4, "TOKENS": tokens}
    form = {"ALL_HEADS": 256, "GROUP_PAD": 4, "D": dim, "FORMAT": name, "BYTES": 64 * dim}
    parts = {"PARTS": 128, "BLOCK": landmark_scores.BLOCK}
    kernel = landmark_scores._landmark_scores_kernel
    compiled = compile_for_hopper(kernel, {**heads, **form, **parts}, "bf16", aligned=True)
    assert "STL" not in compiled.asm["sass"]
    if name != "higgs2":
        return
    turn = {"HEADS": 32, "D": dim, "TURNED": True}
    assert compile_for_hopper(landmark_scores._turn_kernel, turn, "bf16", aligned=True).asm["cubin"]
    weights = {**heads, "SUMS": 128, "PARTS": 128, "BLOCK": token_selection.BLOCK, **PAGES}
    assert compile_for_hopper(token_selection._weights_kernel, weights, "bf16", aligned=True).asm["cubin"]
    marks = {"HELD": token_selection.HELD, "WANTED": token_selection.WANTED, "HOST_SLOT": 64}
    misses = {"HEADS": 8, "ALL_HEADS": 256, "TOKENS": tokens, "PLACES": token_selection.PLACES, **marks, **PAGES}
    compiled = compile_for_hopper(token_selection._misses_kernel, misses, "bf16", aligned=True, warps=8)
    assert compiled.asm["ptx"].count("bar.sync") >= 2
