"""What a runtime does once, when it has its memory: load and compile the kernels that it will use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_kvplug import ops
from vllm_kvplug.worker import sparse

if TYPE_CHECKING:
    from vllm_kvplug.worker.runtime import Runtime


def load_kernels(runtime: Runtime) -> None:
    """Run the ops on one padding row: kernels compile at start-up, never inside a graph capture."""
    assert runtime.tables is not None and runtime.pool is not None
    g, tables = runtime.geometry, runtime.tables
    query = torch.zeros((1, g.query_heads, g.head_dim), dtype=g.dtype, device=runtime.device)
    new = torch.zeros((1, g.kv_heads, g.head_dim), dtype=g.dtype, device=runtime.device)
    nobody = torch.full((1,), -1, dtype=torch.int64, device=runtime.device)
    tables.append(nobody, runtime._row_slot[:1, None], nobody, runtime.sinks, runtime.decode_ring, runtime._place[:1])
    ops.kv_write(runtime.pool.pages, new, new, runtime._place[:1, : g.kv_heads])
    one_token = ops.prefill_plan([(0, 0, 1, 0, 0)], runtime.device)
    if runtime.policy.local is not None:
        sparse.load_kernels(g, runtime.policy.local, runtime.pool.pages, tables)
    elif one_token is not None and not runtime.flash:
        ring = (runtime.sinks, runtime.policy.ring.window) if runtime.policy.ring else None
        where = (runtime.pool.pages, tables.directory, tables.chunks, tables.lengths, one_token)
        ops.prefill_attention(torch.empty_like(query), query, new, new, *where, 0, g.scale, ring)
    if runtime.retriever:
        runtime.retriever.load_kernels()
    if runtime.selector:
        runtime.selector.load_kernels()
    if runtime.page_selector:
        runtime.page_selector.load_kernels()
    runtime._plan_decode(1)
    ops.decode_attention(
        torch.empty_like(query),
        query,
        runtime.pool.pages,
        tables.directory,
        tables.chunks,
        runtime._row_slot[:1],
        tables.lengths,
        0,
        g.kv_heads,
        g.scale,
        runtime.decode_plan,
    )
