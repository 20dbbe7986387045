"""Attention of prompt chunks over head pages and over themselves, all prompt rows of a batch in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

PAGE_TOKENS = 16
CHUNK_PAGES = 64
QUERY_BLOCK = 64
NO_WINDOW = 1 << 30


@triton.jit
def _update(q, k, v, seen, scale, peak, total, acc):
    """One block of keys in the online softmax. seen bool [queries, keys]."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    # A query may see nothing in its first blocks.
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    decay = tl.exp(peak - shift)
    weights = tl.exp(scores - shift[:, None])
    total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return new_peak, total, acc


@triton.jit(do_not_specialize=["first_head"])
def _prefill_attention_kernel(
    out,
    query,
    key,
    value,
    pool,
    directory,
    chunks,
    lengths,
    blocks,
    rows,
    first_head,
    scale,
    sinks,
    window,
    out_token_stride,
    out_head_stride,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    directory_slot_stride,
    directory_head_stride,
    chunk_stride,
    lengths_stride,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
    RING: tl.constexpr,
):
    """A block of queries of one row and one query head. RING: bounded by sinks and window."""
    block, query_head = tl.program_id(0), tl.program_id(1)
    kv_head = query_head // GROUP
    row, first = tl.load(blocks + 2 * block), tl.load(blocks + 2 * block + 1)
    slot = tl.load(rows + 5 * row).to(tl.int64)
    batch_start = tl.load(rows + 5 * row + 1).to(tl.int64)  # of the chunk's first token
    tokens, start = tl.load(rows + 5 * row + 2), tl.load(rows + 5 * row + 3)
    if RING:
        stored = tl.load(rows + 5 * row + 4)
    else:  # heads may have been cut unlike; their lengths count the chunk already
        stored = tl.load(lengths + slot * lengths_stride + first_head + kv_head) - tokens
    chunk_ids = directory + slot * directory_slot_stride + (first_head + kv_head) * directory_head_stride

    d = tl.arange(0, D)
    n = tl.arange(0, KEYS)
    local = first + tl.arange(0, QUERIES)  # in the chunk
    real = local < tokens
    at = batch_start + local
    q_at = query + at[:, None] * query_token_stride + query_head * query_head_stride + d[None, :]
    q = tl.load(q_at, mask=real[:, None], other=0.0)
    query_pos = start + local

    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, D], tl.float32)
    for begin in range(0, stored, KEYS):
        index = begin + n
        kept = index < stored
        chunk = tl.load(chunk_ids + begin // (PAGE * CHUNK)).to(tl.int64)
        page = tl.load(chunks + chunk * chunk_stride + index // PAGE % CHUNK, mask=kept, other=0).to(tl.int64)
        k_at = pool + (page * PAGE + index % PAGE)[:, None] * (2 * D) + d[None, :]
        k = tl.load(k_at, mask=kept[:, None], other=0.0).to(q.dtype)  # pages may be of e4m3 numbers
        v = tl.load(k_at + D, mask=kept[:, None], other=0.0).to(q.dtype)
        seen = kept[None, :] & real[:, None]
        if RING:  # slot `index` of a ring holds the newest position that maps to it
            turned = start - 1 - (start - 1 - index) % window
            key_pos = tl.where(index < sinks, index, turned)
            seen &= (key_pos[None, :] < sinks) | (query_pos[:, None] - key_pos[None, :] < window)
        peak, total, acc = _update(q, k, v, seen, scale, peak, total, acc)

    for begin in range(0, tl.minimum(first + QUERIES, tokens), KEYS):
        index = begin + n
        present = index < tokens
        k_at = key + (batch_start + index)[:, None] * key_token_stride + kv_head * key_head_stride + d[None, :]
        v_at = value + (batch_start + index)[:, None] * value_token_stride + kv_head * value_head_stride + d[None, :]
        k = tl.load(k_at, mask=present[:, None], other=0.0)
        v = tl.load(v_at, mask=present[:, None], other=0.0)
        distance = local[:, None] - index[None, :]
        seen = (distance >= 0) & present[None, :]
        if RING:
            seen &= (start + index[None, :] < sinks) | (distance < window)
        peak, total, acc = _update(q, k, v, seen, scale, peak, total, acc)

    out_at = out + at[:, None] * out_token_stride + query_head * out_head_stride + d[None, :]
    result = acc / tl.where(real, total, 1.0)[:, None]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=real[:, None])


class PrefillPlan:
    """The prompt rows of a batch: which program attends for which queries. Made once per step, for all layers.

    rows: (slot, first token in the batch, tokens, position of the first token, tokens stored before) of each.
    queries: of a program.
    """

    def __init__(
        self, rows: Sequence[tuple[int, int, int, int, int]], device: torch.device, queries: int = QUERY_BLOCK
    ):
        blocks = [(i, first) for i, row in enumerate(rows) for first in range(0, row[2], queries)]
        blocks.reverse()  # a chunk's last queries see the most: what takes longest starts first
        both = torch.tensor([n for row in [*rows, *blocks] for n in row], dtype=torch.int32)
        if device.type == "cuda":
            both = both.pin_memory().to(device, non_blocking=True)
        self.rows, self.blocks = both[: 5 * len(rows)], both[5 * len(rows) :]
        self.programs = len(blocks)


def prefill_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pool: torch.Tensor,
    directory: torch.Tensor,
    chunks: torch.Tensor,
    lengths: torch.Tensor,
    plan: PrefillPlan,
    first_head: int,
    scale: float,
    ring: tuple[int, int] | None,
) -> None:
    """Attention of the planned rows' queries over what their heads store and, causally, over their own chunk.

    out, query [tokens, query heads, D]; key, value [tokens, KV heads, D]; pool, directory, chunks and lengths as for
    `decode_attention`, with the chunk's own tokens counted. Those of a ring lie in its order.
    ring: (sinks, window) that bound what a query sees, or None. Only the planned rows of `out` are written. Weights are
    rounded to the dtype of `value`, as in other flash attention kernels; sums are float32.
    """
    dim, kv_heads = query.shape[2], key.shape[1]
    if any(t.stride(2) != 1 for t in (out, query, key, value)):
        raise ValueError("prefill_attention: the last dimension of its tensors must be contiguous")
    sinks, window = ring or (0, NO_WINDOW)
    _prefill_attention_kernel[(plan.programs, query.shape[1])](
        out,
        query,
        key,
        value,
        pool,
        directory,
        chunks,
        lengths,
        plan.blocks,
        plan.rows,
        first_head,
        scale,
        sinks,
        window,
        out.stride(0),
        out.stride(1),
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        directory.stride(0),
        directory.stride(1),
        chunks.stride(0),
        lengths.stride(0),
        GROUP=query.shape[1] // kv_heads,
        D=dim,
        QUERIES=QUERY_BLOCK,
        KEYS=64 if dim <= 128 else 32,
        PAGE=PAGE_TOKENS,
        CHUNK=CHUNK_PAGES,
        RING=ring is not None,
    )
