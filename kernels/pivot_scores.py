"""What the pivots of a drift check attend to: pooled attention over a whole prompt, read from head pages in place.

Two launches for all pivots: logits of all queries with their sums of exponentials, and softmax, pool and the group's
strongest in one. A check runs beside decode steps and competes with them, so it must touch little memory: keys once,
logits twice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PAGE_TOKENS = 16
CHUNK_PAGES = 64
KEYS, TOKENS = 64, 1024


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["heads", "directory"])
def _logits_kernel(
    logits,
    sums,
    query,
    pool,
    directory,
    chunks,
    heads,
    tokens,
    scale,
    directory_head_stride,
    chunk_stride,
    QUERIES: tl.constexpr,
    QUERIES_PAD: tl.constexpr,
    D: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A block of a prompt's keys of one pivot, with all of its queries. sums: logarithms of sums of exponentials."""
    pivot, begin = tl.program_id(0), tl.program_id(1) * KEYS
    head = tl.load(heads + pivot)
    d, n = tl.arange(0, D), begin + tl.arange(0, KEYS)
    row, real = tl.arange(0, QUERIES_PAD), n < tokens
    # A request that has just ended has -1 for chunks; what is found for it is dropped.
    found_chunk = tl.load(directory + head * directory_head_stride + begin // (PAGE * CHUNK))
    chunk = tl.maximum(found_chunk, 0).to(tl.int64)
    page = tl.load(chunks + chunk * chunk_stride + n // PAGE % CHUNK, mask=real, other=0).to(tl.int64)
    mine = (row < QUERIES)[:, None]
    q_at = query + (pivot * QUERIES + row)[:, None] * D + d[None, :]
    q = tl.load(q_at, mask=mine, other=0.0)
    k_at = pool + (page * PAGE + n % PAGE)[:, None] * (2 * D) + d[None, :]
    k = tl.load(k_at, mask=real[:, None], other=0.0).to(q.dtype)  # pages may be of e4m3 numbers
    found = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    at = (pivot * QUERIES + row).to(tl.int64)[:, None] * tokens + n[None, :]
    tl.store(logits + at, found, mask=mine & real[None, :])
    found = tl.where(real[None, :], found, float("-inf"))
    most = tl.max(found, 1)
    shift = tl.where(tl.abs(most) == float("inf"), 0.0, most)  # as torch.logsumexp
    total = tl.sum(tl.exp(found - shift[:, None]), 1)
    part = (pivot * QUERIES + row) * tl.num_programs(1) + tl.program_id(1)
    tl.store(sums + part, shift + tl.log(total), mask=row < QUERIES)


@triton.jit(do_not_specialize=["tokens"])
def _pool_kernel(scores, logits, norm, tokens, GROUP: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr):
    """Scores of a block of tokens for one query: the largest mean of WIDTH neighbouring weights among its GROUP rows.

    norm: the logarithm of each row's sum of exponentials.
    """
    query = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    most = tl.full([TOKENS], float("-inf"), tl.float32)
    for g in tl.static_range(GROUP):
        row = query * GROUP + g
        of_row = tl.load(norm + row)
        total = tl.zeros([TOKENS], tl.float32)
        for step in tl.static_range(WIDTH):
            at = token + step - WIDTH // 2
            logit = tl.load(logits + row * tokens + at, mask=(at >= 0) & (at < tokens), other=float("-inf"))
            total += tl.exp(logit - of_row)
        total = tl.where(total == total, total / WIDTH, float("inf"))
        most = tl.maximum(most, total)
    tl.store(scores + query * tokens + token, most, mask=token < tokens)


def pivot_scores(
    queries: torch.Tensor,
    pool: torch.Tensor,
    directory: torch.Tensor,
    chunks: torch.Tensor,
    heads: torch.Tensor,
    tokens: int,
    scale: float,
    width: int,
) -> torch.Tensor:
    """`components.drift.pivot_scores` over keys in pages: float32 [pivots, n, tokens].

    queries [pivots, n, group, D], after RoPE; pool [pages, 16, 2 * D]; directory int32 [heads, W] of one request,
    chunks int32 [C, 64]; heads int64 [pivots], flat, of which the first `tokens` stored tokens are the prompt; width:
    of the pool, odd.
    """
    pivots, count, group, dim = queries.shape
    queries, rows = queries.contiguous(), count * group
    logits = torch.empty((pivots, rows, tokens), dtype=torch.float32, device=queries.device)
    scores = torch.empty((pivots, count, tokens), dtype=torch.float32, device=queries.device)
    blocks = triton.cdiv(tokens, KEYS)
    sums = torch.empty((pivots, rows, blocks), dtype=torch.float32, device=queries.device)
    _logits_kernel[(pivots, blocks)](
        logits,
        sums,
        queries,
        pool,
        directory,
        chunks,
        heads,
        tokens,
        scale,
        directory.stride(0),
        chunks.stride(0),
        QUERIES=rows,
        QUERIES_PAD=max(triton.next_power_of_2(rows), 16),
        D=dim,
        KEYS=KEYS,
        PAGE=PAGE_TOKENS,
        CHUNK=CHUNK_PAGES,
        num_warps=4,
    )
    norm = torch.logsumexp(sums, -1)
    grid = (pivots * count, triton.cdiv(tokens, TOKENS))
    _pool_kernel[grid](scores, logits, norm, tokens, GROUP=group, WIDTH=width, TOKENS=TOKENS, num_warps=4)
    return scores
