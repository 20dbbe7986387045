"""Scores of landmarks in pages, for every row and KV head of a layer, in lines (kernels/lines.py).

A key of codes is looked up once for all queries of its group, and multiplied with them after their Hadamard transform,
which is what `Higgs.lut` does by other means. Each part of a head also says what its softmax will need: the largest
score of every query, and the sum of exponentials.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from vllm_kvplug.kernels.lines import parts_of, segment

BLOCK = 64
PART = 1024
"""Tokens of a head that are worth a part of their own."""


@triton.jit
def _turn_kernel(out, query, row_stride, head_stride, HEADS: tl.constexpr, D: tl.constexpr, TURNED: tl.constexpr):
    """One query in float32, or where keys are codes by the Hadamard matrix, divided by D."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, j = tl.arange(0, D), tl.arange(0, D)
    values = tl.load(query + row * row_stride + head * head_stride + i).to(tl.float32)
    if TURNED:
        odd = i[:, None] & j[None, :]
        odd ^= odd >> 4
        odd ^= odd >> 2
        odd ^= odd >> 1
        values = tl.sum(tl.where((odd & 1) != 0, -values[:, None], values[:, None]), 0) / D
    tl.store(out + (row * HEADS + head) * D + j, values)


@triton.jit
def _coded(query, codes, words, PIECES: tl.constexpr, VALUES: tl.constexpr):
    """Dot products of a query with encoded keys, float32 [n].

    codes: uint8 [n, PIECES], each of which stands for VALUES float16, a row of a grid, which lies in `words`.
    """
    piece, code = tl.arange(0, PIECES), codes.to(tl.int32)
    total = tl.zeros(codes.shape, tl.float32)
    for word in tl.static_range((VALUES + 3) // 4):
        packed = tl.load(words + code * ((VALUES + 3) // 4) + word)
        for j in tl.static_range(VALUES if VALUES < 4 else 4):
            value = (packed >> (16 * j)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            total += value * tl.load(query + piece * VALUES + word * 4 + j)[None, :]
    return tl.sum(total, 1)


@triton.jit
def _key_scores(
    query, page, halves, token, real, coarse, fine, FORMAT: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr
):
    """Of one query with the keys of tokens in their pages: float32 [n].

    page: bytes [n], where the page of each begins; halves: the same as float16; token: its number in it.
    """
    of_group = token // 8
    if FORMAT == "higgs2":
        CODES: tl.constexpr = D // 4
        piece = tl.arange(0, CODES)
        codes = tl.load(page[:, None] + (token * CODES)[:, None] + piece[None, :], mask=real[:, None], other=0)
        scale = tl.load(halves + TOKENS * CODES // 2 + token, mask=real, other=0.0).to(tl.float32)
        return _coded(query, codes, fine, CODES, 4) * scale
    elif FORMAT == "residual":
        MEAN: tl.constexpr = D // 2
        CODES: tl.constexpr = D // 8
        MEANS: tl.constexpr = TOKENS // 8 * (MEAN + 2)
        piece, of_mean = tl.arange(0, CODES), tl.arange(0, MEAN)
        means = tl.load(page[:, None] + (of_group * MEAN)[:, None] + of_mean[None, :], mask=real[:, None], other=0)
        mean_scale = tl.load(halves + TOKENS // 8 * MEAN // 2 + of_group, mask=real, other=0.0).to(tl.float32)
        codes = tl.load(page[:, None] + MEANS + (token * CODES)[:, None] + piece[None, :], mask=real[:, None], other=0)
        scale = tl.load(halves + (MEANS + TOKENS * CODES) // 2 + token, mask=real, other=0.0).to(tl.float32)
        return _coded(query, means, coarse, MEAN, 2) * mean_scale + _coded(query, codes, fine, CODES, 8) * scale
    else:
        d = tl.arange(0, D)
        mean = tl.load(halves[:, None] + (of_group * D)[:, None] + d[None, :], mask=real[:, None], other=0.0)
        return tl.sum(mean.to(tl.float32) * tl.load(query + d)[None, :], 1)


@triton.jit(do_not_specialize=["first_head", "blocks_stride"])
def _landmark_scores_kernel(
    scores,
    sums,
    query,
    page_bytes,
    page_halves,
    coarse,
    fine,
    blocks,
    row_slot,
    landmarks,
    starts,
    first_head,
    scale,
    blocks_stride,
    HEADS: tl.constexpr,
    ALL_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    D: tl.constexpr,
    FORMAT: tl.constexpr,
    TOKENS: tl.constexpr,
    BYTES: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    item, part = tl.program_id(0), tl.program_id(1)
    row, head = (item // HEADS).to(tl.int64), item % HEADS
    length = tl.load(landmarks + item)
    if length == 0:
        return
    slot = tl.load(row_slot + row).to(tl.int64)
    begin = segment(starts, row, head, HEADS, TOKENS * GROUP)
    stride = (tl.load(starts + row + 1) - tl.load(starts + row)) * TOKENS
    g = tl.arange(0, GROUP_PAD)
    peak = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    share = tl.cdiv(length, PARTS * BLOCK) * BLOCK
    for first in range(part * share, tl.minimum((part + 1) * share, length), BLOCK):
        token = first + tl.arange(0, BLOCK)
        real = token < length
        block = tl.load(blocks + slot * blocks_stride + token // TOKENS, mask=real, other=0)
        page = (block * ALL_HEADS + first_head + head) * BYTES
        where = page_bytes + page, page_halves + page // 2, token % TOKENS, real
        found = tl.zeros([BLOCK, GROUP_PAD], tl.float32)
        for i in tl.static_range(GROUP):
            of_query = query + ((row * HEADS + head) * GROUP + i) * D
            score = _key_scores(of_query, *where, coarse, fine, FORMAT, D, TOKENS) * scale
            found = tl.where((g == i)[None, :], score[:, None], found)
        at = scores + begin + (g * stride)[None, :] + token[:, None]
        tl.store(at, found, mask=real[:, None] & (g < GROUP)[None, :])
        found = tl.where(real[:, None], found, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(found, 0))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        total = total * tl.exp(peak - shift) + tl.sum(tl.exp(found - shift[None, :]), 0)
        peak = new_peak
    at = sums + ((item * PARTS + part) * GROUP + g) * 2
    tl.store(at, peak, mask=g < GROUP)
    tl.store(at + 1, total, mask=g < GROUP)


def words_of(grid: torch.Tensor) -> torch.Tensor:
    """A grid of float16 [256, values] in words of 4 values, int64, or of 2, int32."""
    return grid.contiguous().view(torch.int32 if grid.shape[1] == 2 else torch.int64).flatten()


def parts_of_scores(rows: int, heads: int, longest: int) -> int:
    """Into how many parts heads of up to `longest` landmarks are cut."""
    return parts_of(rows * heads, longest, PART)


def landmark_scores(
    scores: torch.Tensor,
    sums: torch.Tensor,
    query: torch.Tensor,
    scratch: torch.Tensor,
    pages: torch.Tensor,
    name: str,
    tokens: int,
    grids: tuple[torch.Tensor, torch.Tensor],
    blocks: torch.Tensor,
    row_slot: torch.Tensor,
    landmarks: torch.Tensor,
    starts: torch.Tensor,
    heads: tuple[int, int, int],
    scale: float,
    longest: int,
) -> None:
    """Write the dot products of queries with the keys that landmarks stand for, times `scale`.

    scores: float32, a line with `starts`, int32 [rows + 1], and unit tokens * G: query i of a group has those of its
    head's segment from i times the landmarks of all its pages on. sums: float32 [rows * KV heads, parts, G, 2],
    written: largest score and sum of exponentials of each of `parts_of_scores` parts. query [rows, query heads, D], D a
    power of two from 16 to 256, the last dimension contiguous; scratch float32 [rows, query heads, D]. pages uint8
    [N, bytes] of format `name` (components/landmarks.py), with `tokens` landmarks each; grids: `words_of` those of 4
    bits and of keys' own codes. blocks int64 [slots, n], whose place first_head + h is the page of head h. row_slot
    int32 [rows]; landmarks int32 [rows, KV heads], contiguous, 0 for rows that do not select, at most `longest`. heads:
    first_head, KV heads of a layer, and of all.
    """
    rows, query_heads, dim = query.shape
    first_head, kv_heads, all_heads = heads
    group = query_heads // kv_heads
    parts = parts_of_scores(rows, kv_heads, longest)
    shape = {"HEADS": query_heads, "D": dim, "TURNED": name != "means8"}
    _turn_kernel[(rows, query_heads)](scratch, query, query.stride(0), query.stride(1), **shape)
    sizes = {"HEADS": kv_heads, "ALL_HEADS": all_heads, "GROUP": group, "GROUP_PAD": triton.next_power_of_2(group)}
    form = {"D": dim, "FORMAT": name, "TOKENS": tokens, "BYTES": pages.shape[1], "PARTS": parts, "BLOCK": BLOCK}
    what = scores, sums, scratch, pages, pages.view(torch.float16), *grids, blocks, row_slot, landmarks, starts
    numbers = first_head, scale, blocks.stride(0)
    _landmark_scores_kernel[(rows * kv_heads, parts)](*what, *numbers, **sizes, **form)
