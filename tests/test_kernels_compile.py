"""The Triton kernels compile for an H100 or H200; that needs no GPU. What they compute is tested elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

triton = pytest.importorskip("triton")
pytest.importorskip("triton.backends.nvidia")

from vllm_kvplug.kernels import append, decode_attention, fetches, pivot_scores, prefill_attention  # noqa: E402

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
    "chunk_scores": "*fp32",
    "scores": "*fp32",
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
}
TENSORS = ("out", "query", "key", "value", "pool")
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
                {**shape, "QUERIES": 64, "KEYS": keys, "RING": ring, "GATED": not ring, **PAGES},
            )
            for ring in (True, False)
        ),
        (pivot_scores._logits_kernel, {"QUERIES": 24, "QUERIES_PAD": 32, "D": dim, "KEYS": keys, **PAGES}),
    ]


TABLES = [
    (decode_attention._plan_kernel, {"HEADS": 8, "ITEMS": 2048, "SHORTEST": 7, "LONGEST": 20}),
    (decode_attention._inverse_kernel, {"STEPS": 12, "BLOCK": 128}),
    (pivot_scores._pool_kernel, {"GROUP": 4, "WIDTH": 5, "TOKENS": 1024}),
    (fetches._fetches_kernel, {"HOST_SLOT": 64, "TOKENS": 2048, **PAGES}),
    (append._append_kernel, {"HEADS": 90, "HEADS_PAD": 128, **PAGES}),
]


def compile_for_hopper(kernel: Any, constants: dict[str, Any], dtype: str, pages: str | None = None) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if (
            name == "rows" and kernel is not fetches._fetches_kernel
        ):  # block tables here, a description of prompt rows or a count there
            return "i32" if kernel is decode_attention._plan_kernel else "*i32"
        if kernel is fetches._fetches_kernel and name in ("positions", "target", "rows", "rank", "columns"):
            return "*i64"
        if name == "pool":
            return f"*{pages or dtype}"
        return f"*{dtype}" if name in TENSORS else INTEGERS.get(name, "i32")

    signature = {name: kind(name) for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32))


@pytest.mark.parametrize("dtype, dim", [("bf16", 64), ("bf16", 128), ("fp16", 256), ("fp32", 32)])
def test_attention_compiles(dtype: str, dim: int) -> None:
    for kernel, constants in attention(dtype, dim):
        assert compile_for_hopper(kernel, constants, dtype).asm["cubin"]


def test_attention_over_e4m3_compiles() -> None:
    for kernel, constants in attention("bf16", 128):
        assert compile_for_hopper(kernel, constants, "bf16", pages="fp8e4nv").asm["cubin"]


def test_tables_compile() -> None:
    for kernel, constants in TABLES:
        assert compile_for_hopper(kernel, constants, "bf16").asm["cubin"]
