"""Decode attention over head pages: one query token per row, each KV head with a length of its own."""

import torch
import triton
import triton.language as tl

PAGE_TOKENS = 16
CHUNK_PAGES = 64


# first_head differs by layer: specialising on it would compile the kernel anew for some layers.
@triton.jit(do_not_specialize=["first_head"])
def _decode_attention_kernel(
    out,
    query,
    pool,
    directory,
    chunks,
    row_slot,
    lengths,
    first_head,
    scale,
    out_row_stride,
    out_head_stride,
    query_row_stride,
    query_head_stride,
    directory_slot_stride,
    directory_head_stride,
    chunk_stride,
    lengths_stride,
    GROUP: tl.constexpr,  # query heads per KV head
    GROUP_PAD: tl.constexpr,  # GROUP padded to what tl.dot takes
    D: tl.constexpr,
    BLOCK: tl.constexpr,  # tokens per iteration
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    slot = tl.load(row_slot + row).to(tl.int64)
    head = first_head + kv_head
    # A padding row is a row of length 0: nothing is read, zeros are written.
    length = tl.load(lengths + slot * lengths_stride + head, mask=slot >= 0, other=0)
    chunk_ids = directory + slot * directory_slot_stride + head * directory_head_stride

    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, D)
    query_head = kv_head * GROUP + g
    in_group = (g < GROUP)[:, None]
    q = tl.load(
        query + row * query_row_stride + query_head[:, None] * query_head_stride + d[None, :],
        mask=in_group,
        other=0.0,
    )

    peak = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, D], tl.float32)
    for start in range(0, length, BLOCK):
        token = start + tl.arange(0, BLOCK)
        stored = token < length
        page = token // PAGE
        chunk = tl.load(chunk_ids + page // CHUNK, mask=stored, other=0).to(tl.int64)
        page_id = tl.load(chunks + chunk * chunk_stride + page % CHUNK, mask=stored, other=0).to(tl.int64)
        keys = pool + (page_id * PAGE + token % PAGE)[:, None] * (2 * D) + d[None, :]
        k = tl.load(keys, mask=stored[:, None], other=0.0)
        v = tl.load(keys + D, mask=stored[:, None], other=0.0)

        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(stored[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        decay = tl.exp(peak - new_peak)
        weights = tl.exp(scores - new_peak[:, None])
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        # Reduced-precision values take weights of their own dtype. A second term holds what that rounding
        # loses, so the softmax stays a float32 one.
        high = weights.to(v.dtype)
        acc = tl.dot(high, v, acc, input_precision="ieee")
        if v.dtype != tl.float32:
            acc = tl.dot((weights - high.to(tl.float32)).to(v.dtype), v, acc)
        peak = new_peak

    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out + row * out_row_stride + query_head[:, None] * out_head_stride + d[None, :],
        result.to(out.dtype.element_ty),
        mask=in_group,
    )


def decode_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    pool: torch.Tensor,
    directory: torch.Tensor,
    chunks: torch.Tensor,
    row_slot: torch.Tensor,
    lengths: torch.Tensor,
    first_head: int,
    num_kv_heads: int,
    scale: float,
) -> None:
    """Attend each row's query to every stored token of its heads; see vllm_kvplug.ops.decode_attention.

    The grid is (R, num_kv_heads) whatever the lengths are and nothing is read back to the host, so a
    captured CUDA graph stays right when the contents of any argument change. `directory`, `chunks`,
    `row_slot` and `lengths` must be contiguous in their last dimension; page ids are not checked.

    Raises ValueError for a head size that is not a power of two from 16 to 256, and for an `out` or `query`
    that is not contiguous in its last dimension.
    """
    rows, query_heads, dim = query.shape
    if dim not in (16, 32, 64, 128, 256):
        raise ValueError(f"decode_attention: head size must be a power of two from 16 to 256, got {dim}")
    if out.stride(2) != 1 or query.stride(2) != 1:
        raise ValueError("decode_attention: the last dimension of out and query must be contiguous")
    if rows == 0:
        return
    group = query_heads // num_kv_heads
    _decode_attention_kernel[(rows, num_kv_heads)](
        out,
        query,
        pool,
        directory,
        chunks,
        row_slot,
        lengths,
        first_head,
        scale,
        out.stride(0),
        out.stride(1),
        query.stride(0),
        query.stride(1),
        directory.stride(0),
        directory.stride(1),
        chunks.stride(0),
        lengths.stride(0),
        GROUP=group,
        GROUP_PAD=max(16, triton.next_power_of_2(group)),
        D=dim,
        BLOCK=64 if dim <= 128 else 32,
        PAGE=PAGE_TOKENS,
        CHUNK=CHUNK_PAGES,
    )
