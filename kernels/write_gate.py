"""WG-KV's write gate (2512.17452) on rotated keys, all heads of a layer in one launch: what is between a key and its
score never leaves the chip.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FEW_TOKENS, MANY_TOKENS, UNITS = 16, 64, 64
"""Tokens of a program, for a few and for more, and hidden units of a step."""


@triton.jit
def _normed(first, second, weight, half, there, D: tl.constexpr):
    """RMSNorm of keys given in two halves [tokens, D / 2], in float32; the gates' epsilon."""
    square = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    factor = tl.rsqrt(square / D + 1e-6)[:, None]
    weight_first = tl.load(weight + half, mask=there, other=0.0).to(tl.float32)
    weight_second = tl.load(weight + D // 2 + half, mask=there, other=0.0).to(tl.float32)
    return first * factor * weight_first[None, :], second * factor * weight_second[None, :]


@triton.jit(do_not_specialize=["tokens", "first_head"], do_not_specialize_on_alignment=["position", "b1", "b2"])
def _write_gate_kernel(
    out,
    key,
    position,
    frequencies,
    norm_pre,
    norm_rope,
    w1,
    b1,
    w2,
    b2,
    tokens,
    first_head,
    key_token_stride,
    key_head_stride,
    out_token_stride,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HIDDEN: tl.constexpr,
    UNITS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Some tokens of one head. HALF >= D / 2, a power of two."""
    head = tl.program_id(1)
    gate = (first_head + head).to(tl.int64)  # the weights are of all heads
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    real = t < tokens
    half = tl.arange(0, HALF)
    there = half < D // 2
    present = real[:, None] & there[None, :]
    at = key + t.to(tl.int64)[:, None] * key_token_stride + head * key_head_stride + half[None, :]
    first = tl.load(at, mask=present, other=0.0).to(tl.float32)
    second = tl.load(at + D // 2, mask=present, other=0.0).to(tl.float32)
    angle = tl.load(position + t, mask=real, other=0).to(tl.float32)[:, None]
    angle *= tl.load(frequencies + half, mask=there, other=0.0)[None, :]
    cos, sin = tl.cos(angle), tl.sin(angle)
    x0, x1 = _normed(first * cos + second * sin, second * cos - first * sin, norm_pre, half, there, D)
    x2, x3 = _normed(first, second, norm_rope, half, there, D)
    kind = w1.dtype.element_ty
    x0, x1, x2, x3 = x0.to(kind), x1.to(kind), x2.to(kind), x3.to(kind)

    logit = tl.zeros([TOKENS], tl.float32) + tl.load(b2 + gate).to(tl.float32)
    for begin in range(0, HIDDEN, UNITS):
        unit = begin + tl.arange(0, UNITS)
        some = unit < HIDDEN
        # [D / 2, units]: a quarter of the inputs at a time
        w_at = w1 + (gate * HIDDEN + unit)[None, :] * (2 * D) + half[:, None]
        wanted = some[None, :] & there[:, None]
        bias = tl.load(b1 + gate * HIDDEN + unit, mask=some, other=0.0).to(tl.float32)
        hidden = tl.zeros([TOKENS, UNITS], tl.float32) + bias[None, :]
        hidden = tl.dot(x0, tl.load(w_at, mask=wanted, other=0.0), hidden, input_precision="ieee")
        hidden = tl.dot(x1, tl.load(w_at + D // 2, mask=wanted, other=0.0), hidden, input_precision="ieee")
        hidden = tl.dot(x2, tl.load(w_at + D, mask=wanted, other=0.0), hidden, input_precision="ieee")
        hidden = tl.dot(x3, tl.load(w_at + D + D // 2, mask=wanted, other=0.0), hidden, input_precision="ieee")
        active = 0.5 * hidden * (1.0 + tl.erf(hidden * 0.7071067811865476))
        outer = tl.load(w2 + gate * HIDDEN + unit, mask=some, other=0.0).to(tl.float32)
        logit += tl.sum(active * outer[None, :], 1)
    score = 1.0 / (1.0 + tl.exp(-logit))
    tl.store(out + t.to(tl.int64) * out_token_stride + head, score, mask=real)


def write_gate(
    out: torch.Tensor,
    key: torch.Tensor,
    position: torch.Tensor,
    frequencies: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor],
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    first_head: int,
) -> None:
    """As `vllm_kvplug.ops.write_gate` says."""
    tokens, heads, dim = key.shape
    if key.stride(2) != 1 or out.stride(1) != 1 or not all(w.is_contiguous() for w in (*norms, *weights)):
        raise ValueError("write_gate: weights, and the last dimension of keys and scores, must be contiguous")
    block = FEW_TOKENS if tokens <= FEW_TOKENS else MANY_TOKENS
    _write_gate_kernel[(triton.cdiv(tokens, block), heads)](
        out,
        key,
        position,
        frequencies,
        *norms,
        *weights,
        tokens,
        first_head,
        key.stride(0),
        key.stride(1),
        out.stride(0),
        D=dim,
        HALF=max(triton.next_power_of_2(dim // 2), 16),
        HIDDEN=weights[0].shape[1],
        UNITS=UNITS,
        TOKENS=block,
    )
