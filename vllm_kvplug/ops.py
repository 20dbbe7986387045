"""The custom ops, dispatched by device. The compiled library is loaded at the first call.

Layout, shared by the ops on head pages: `pool` [P, 16, 2*D] is contiguous and holds P head pages, a token's K in
[:D] and its V in [D:] of the last dimension, as float32, bfloat16 or float16. Token slot = page * 16 + offset.
"""

import functools
import importlib.machinery
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

NAMESPACE = "vllm_kvplug"


@functools.cache
def load_library() -> str:
    """Load `vllm_kvplug._C`, or build it if it is missing or was built for another torch. Says in words which.

    Raises RuntimeError if it has to be built and cannot be, for want of a compiler for instance.
    """
    # Only this interpreter's suffixes: a checkout may hold builds for several.
    candidates = [Path(__file__).with_name(f"_C{suffix}") for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    built = next((path for path in candidates if path.exists()), None)
    how = f"{built.name}, built ahead" if built else "no prebuilt library in the package"
    if built is None:
        _build_library(how)
    else:
        try:
            torch.ops.load_library(built)
        except OSError as error:
            how = f"{built.name} does not load with torch {torch.__version__}: {error}"
            _build_library(how)
    names = ("kv_write", "decode_attention", "decode_plan", "decode_attention_planned")
    for name in (*names, "higgs_encode", "higgs_decode", "higgs_scores", "landmark_scores", "fetch_tokens"):
        # The ops only write into arguments: under fake tensors there is nothing to compute.
        torch.library.register_fake(f"{NAMESPACE}::{name}", lambda *args: None)
    return how


def _build_library(reason: str) -> None:
    from torch.utils import cpp_extension

    from vllm_kvplug.csrc import LINK_FLAGS, compile_flags, has_cuda, sources

    cuda = has_cuda()
    flags = compile_flags()
    logger.warning("Building the custom ops of vllm_kvplug (%s). This takes a minute, once per torch version.", reason)
    if torch.version.cuda is not None and not cuda:
        logger.warning("nvcc was not found (set CUDA_HOME): kv_write and higgs_* will not take CUDA tensors.")
    try:
        cpp_extension.load(
            name=re.sub(r"\W", "_", f"{NAMESPACE}_C_{torch.__version__}"),
            sources=sources(cuda),
            extra_cflags=flags["cxx"],
            extra_cuda_cflags=flags["nvcc"],
            extra_ldflags=LINK_FLAGS,
            with_cuda=cuda,
            is_python_module=False,
        )
    except (OSError, RuntimeError) as error:
        raise RuntimeError(
            "The custom ops of vllm_kvplug could not be built. They need ninja and a C++ compiler (g++ 11 or "
            "newer), and on CUDA also nvcc; `pip install --no-build-isolation vllm_kvplug` builds them ahead."
        ) from error


def kv_write(pool: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dest: torch.Tensor) -> None:
    """Store the K and V of T tokens in their token slots.

    Args:
        pool: [P, 16, 2*D], written in place.
        key, value: [T, H, D], the dtype of `pool`; any strides, but the last dimension contiguous.
        dest: int64 [T, H], any strides; the token slot of each (token, head), or -1 to write nothing.
            Slots must not repeat.

    Raises:
        RuntimeError: wrong shapes, dtypes or devices.
        IndexError: on the CPU, a slot outside the pool. On CUDA such a slot stops the kernel.
    """
    load_library()
    torch.ops.vllm_kvplug.kv_write(pool, key, value, dest)


def gather_rows(out: torch.Tensor, pool: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy rows of a pool: out[i] = pool[rows[i]].

    On CUDA the kernel reads pinned memory itself, so that small rows travel as fast as large ones; it is queued on the
    current stream and takes few multiprocessors, but for a pool in device memory all of them.

    Args:
        out: uint8 [n, bytes], contiguous, written in place.
        pool: uint8 [R, bytes], contiguous; on the CPU, pinned if the others are on CUDA, or where they are.
        rows: int64 [n], on the device of `out`.

    Raises:
        RuntimeError: wrong shapes, dtypes or devices, or a pool that a GPU cannot read.
        IndexError: on the CPU, a row outside the pool. On CUDA such a row stops the kernel.
    """
    if out.is_cuda:
        load_library()
        torch.ops.vllm_kvplug.gather_rows(out, pool, rows)
    else:
        out.copy_(pool[rows])


def scatter_rows(pool: torch.Tensor, values: torch.Tensor, rows: torch.Tensor) -> None:
    """The other way: pool[rows[i]] = values[i]; see `gather_rows`. Rows must not repeat."""
    if values.is_cuda:
        load_library()
        torch.ops.vllm_kvplug.scatter_rows(pool, values.contiguous(), rows)
    else:
        pool[rows] = values


def decode_plan(
    rows: int, layers: int, kv_heads: int, query_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Any:
    """Which part of which head each block of a decode launch attends to, for up to `rows` rows on CUDA. None on the
    CPU, where the op divides the work itself.

    dtype is that of queries. Call its `update(row_slot, lengths)` whenever either or a table has changed, before
    `decode_attention`; both run on the device alone. `nbytes` is what it takes there.
    """
    if device.type != "cuda":
        return None
    from vllm_kvplug.kernels import hopper
    from vllm_kvplug.kernels.decode_attention import DecodePlan

    shape = rows, layers, kv_heads, query_heads, head_dim
    if hopper.runs_here(*shape[2:], dtype, device):
        return hopper.HopperPlan(*shape, device)
    return DecodePlan(*shape, device)


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
    plan: Any = None,
) -> None:
    """Softmax attention of one query token per row over all stored tokens of one layer's heads, in float32.

    Query head q reads KV head q // (Hq // num_kv_heads). Token j of head n of request slot s lies at offset
    j % 16 of page chunks[directory[s, n, j // 1024], j // 16 % 64].

    Args:
        out: [R, Hq, D], written in place. Padding rows and heads of length 0 become zeros.
        query: [R, Hq, D]; like `out`, of the dtype of `pool` and contiguous in the last dimension.
        pool: [P, 16, 2*D].
        directory: int32 [S, N, W], chunk ids by request slot and head; N = layers * KV heads of this rank.
        chunks: int32 [C, 64], page ids.
        row_slot: int32 [R], the request slot of each row; -1 marks a padding row.
        lengths: int32 [S, N], stored tokens of each head; all of them are visible to the query.
        first_head: the layer's heads are first_head ... first_head + num_kv_heads - 1 of N.
        num_kv_heads: KV heads of the layer; divides Hq.
        scale: factor of the scores before the softmax.
        plan: a `decode_plan` that was updated for these rows, lengths and tables; on CUDA one is made if it is None.

    Raises:
        RuntimeError: on the CPU, wrong shapes or dtypes.
        IndexError: on the CPU, an id outside its table. On CUDA ids are not checked.
        ValueError: on CUDA, a head size that is not a power of two from 16 to 256, or a last dimension of
            `out` or `query` that is not contiguous.
    """
    if query.shape[0] == 0:
        return
    tensors = (out, query, pool, directory, chunks, row_slot, lengths)
    if query.is_cuda:
        if plan is None:
            rows, query_heads, dim = query.shape
            layers = lengths.shape[1] // num_kv_heads
            plan = decode_plan(rows, layers, num_kv_heads, query_heads, dim, query.dtype, query.device)
            plan.update(row_slot, lengths)
        plan.attend(*tensors, first_head, scale)
    else:
        load_library()
        torch.ops.vllm_kvplug.decode_attention(*tensors, first_head, num_kv_heads, scale)


def prefill_plan(rows: Sequence[tuple[int, int, int, int, int]], device: torch.device) -> Any:
    """A `PrefillPlan` of a batch's prompt rows on CUDA, None on the CPU or without rows.

    rows: (request slot, first token in the batch, tokens, position of the first, tokens stored before) of each.
    """
    if device.type != "cuda" or not rows:
        return None
    from vllm_kvplug.kernels.prefill_attention import PrefillPlan

    return PrefillPlan(rows, device)


def prefill_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pool: torch.Tensor,
    directory: torch.Tensor,
    chunks: torch.Tensor,
    lengths: torch.Tensor,
    plan: Any,
    first_head: int,
    scale: float,
    ring: tuple[int, int] | None,
) -> None:
    """Attention of prompt chunks over what their heads store and, causally, over themselves. CUDA only.

    Args:
        out, query: [tokens, Hq, D]; only the planned rows of `out` are written.
        key, value: [tokens, H, D], of the same tokens.
        pool, directory, chunks, lengths: as in `decode_attention`; the chunks' own tokens are counted.
        plan: the `prefill_plan` of the rows.
        first_head: the layer's heads are first_head ... first_head + H - 1.
        ring: (sinks, window) that bound what a query sees, and in whose order heads store tokens; or None.

    Raises:
        ValueError: a last dimension that is not contiguous.
    """
    from vllm_kvplug.kernels.prefill_attention import prefill_attention as run

    run(out, query, key, value, pool, directory, chunks, lengths, plan, first_head, scale, ring)


def sparse_prefill_plan(
    rows: Sequence[tuple[int, int, int, int, int]], group: int, dim: int, dtype: torch.dtype, device: torch.device
) -> Any:
    """A plan for `sparse_prefill`; rows as for `prefill_plan`, group: query heads a KV head, dtype: of queries."""
    from vllm_kvplug.kernels.sparse_prefill import sparse_prefill_plan as plan

    return plan(rows, group, dim, dtype, device)


def sparse_prefill(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    admitted: torch.Tensor,
    pool: torch.Tensor,
    directory: torch.Tensor,
    chunks: torch.Tensor,
    lengths: torch.Tensor,
    positions: torch.Tensor,
    scores: torch.Tensor,
    plan: Any,
    first_head: int,
    scale: float,
    window: int,
    sinks: int,
    threshold: float,
    earlier: tuple[torch.Tensor, torch.Tensor, int] | None = None,
) -> None:
    """Attention of prompt chunks where a query sees, beyond its window, only tokens that a gate admitted. CUDA only.

    Weights are rounded to the dtype of `value`, as in other flash attention kernels; sums are float32.

    Args:
        out, query: [tokens, Hq, D]; only the planned rows of `out` are written.
        key, value: [tokens, H, D], of the same tokens.
        admitted: bool [tokens, H], whether the new tokens are seen from beyond the window.
        pool, directory, chunks, lengths: as in `decode_attention`; the chunks' own tokens are counted.
        positions, scores: int32 and float32 [pages, 16], of stored tokens. What scored above `threshold`, or is among
            the `sinks` first, counts as admitted.
        plan: the `sparse_prefill_plan` of the rows.
        first_head: the layer's heads are first_head ... first_head + H - 1.
        window: a query at position p sees those from p - window + 1 on.
        earlier: what was already attended to of all that heads store behind their first `window` tokens: outputs
            [H * n, Hq / H, D] of the n tokens from a first one on, KV heads outermost, logarithms of sums of
            exponentials, float32 [Hq / H, H * n], both contiguous, and that first token. None: nothing was.

    Raises:
        ValueError: a last dimension that is not contiguous.
    """
    from vllm_kvplug.kernels.sparse_prefill import sparse_prefill as run

    of_pages = pool, directory, chunks, lengths, positions, scores
    seen = window, sinks, threshold
    run(out, query, key, value, admitted, *of_pages, plan, first_head, scale, *seen, earlier)


def write_gate(
    out: torch.Tensor,
    key: torch.Tensor,
    position: torch.Tensor,
    frequencies: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor],
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    first_head: int,
) -> None:
    """WG-KV's write gate on one layer's rotated keys; `WriteGate.score` is the same in torch. CUDA only.

    Matrix products take their inputs in the weights' dtype; all else is float32. A NaN in a key makes its score NaN.

    Args:
        out: float32 [tokens, H], written in place: scores from 0 to 1.
        key: [tokens, H, D], after RoPE of whole heads, dimension i together with i + D / 2; D is even.
        position: int64 [tokens], of the keys.
        frequencies: float32 [D / 2], radians per position.
        norms: [D] each, of keys before and after RoPE.
        weights: w1 [all heads, m, 2 D], b1 and w2 [all heads, m], b2 [all heads], of the layer's heads on all ranks.
        first_head: the keys are those of heads first_head ... first_head + H - 1.

    Raises:
        ValueError: weights, or a last dimension of keys or scores, that are not contiguous.
    """
    from vllm_kvplug.kernels.write_gate import write_gate as run

    run(out, key, position, frequencies, norms, weights, first_head)


def higgs_encode(codes: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, grid: torch.Tensor) -> None:
    """Quantise N rows (HIGGS; 2604.08426): transform, divide by the norm, take each piece's nearest code vector.

    Codes are the same on every device and with every compiler: they belong to the scale as it is stored.

    Args:
        codes: uint8 [N, group / p], written in place; group is a power of two from 16 to 256, at least D.
        scale: float16 [N], written in place: the norm of a row, at most 65504. NaN, with all codes 0, where a row
            holds an inf or NaN.
        x: [N, D], float32, bfloat16 or float16, contiguous in the last dimension; padded to `group` with zeros.
        grid: float16 [256, p], p of 2, 4 or 8; contiguous, as `codes` and `scale` must be. Of two code vectors
            equally near the first is taken.

    Raises:
        RuntimeError: wrong shapes, dtypes, strides or devices.
    """
    load_library()
    torch.ops.vllm_kvplug.higgs_encode(codes, scale, x, grid)


def higgs_decode(out: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, grid: torch.Tensor) -> None:
    """The rows that `higgs_encode` stood for.

    Args:
        out: [N, D], written in place; float32, bfloat16 or float16, contiguous in the last dimension. What exceeds
            its largest finite number becomes that. Rows with a NaN for scale are NaN.
        codes, scale, grid: as in `higgs_encode`.

    Raises:
        RuntimeError: wrong shapes, dtypes, strides or devices.
    """
    load_library()
    torch.ops.vllm_kvplug.higgs_decode(out, codes, scale, grid)


def higgs_scores(out: torch.Tensor, lut: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> None:
    """Dot products of queries with encoded keys, by look-up: scale[h, t] * sum of lut[h, g, i, codes[h, t, i]] over i.

    Args:
        out: float32 [H, G, T], written in place, contiguous.
        lut: float32 [H, G, P, 256], contiguous: the dot product of piece i of the transformed query with every
            code vector.
        codes: uint8 [H, T, P], contiguous in the last dimension.
        scale: float16 [H, T], any strides.

    Raises:
        RuntimeError: wrong shapes, dtypes, strides or devices; on CUDA also more than 227 KiB for the table of one
            query, less on small GPUs.
    """
    load_library()
    torch.ops.vllm_kvplug.higgs_scores(out, lut, codes, scale)


def landmark_scores(
    out: torch.Tensor, lut: torch.Tensor, pages: torch.Tensor, page: torch.Tensor, page_tokens: int
) -> None:
    """As `higgs_scores`, for keys whose codes lie in pages, codes first and scales behind them; all rows in one launch.

    Args:
        out: float32 [R, H, G, M * page_tokens], written in place, contiguous.
        lut: float32 [R, H, G, P, 256], contiguous, P a multiple of 4.
        pages: uint8 [N, bytes], contiguous: `page_tokens` codes of P bytes and as many float16 scales in each.
        page: int64 [R, H, M], contiguous: the pages of each row and head, in order.

    Raises:
        RuntimeError: wrong shapes, dtypes, strides or devices; tables too large, as in `higgs_scores`.
        IndexError: on the CPU, a page that is not there. On CUDA it stops the kernel.
    """
    load_library()
    torch.ops.vllm_kvplug.landmark_scores(out, lut, pages, page, page_tokens)


def fetch_tokens(
    pool: torch.Tensor,
    rows: torch.Tensor,
    source: torch.Tensor,
    position: torch.Tensor,
    dest: torch.Tensor,
    frequencies: torch.Tensor,
    grid: torch.Tensor | None,
    dtype: torch.dtype,
    count: torch.Tensor | None = None,
) -> None:
    """Put tokens that lie in CPU memory in pages: decode K and V, and turn K by RoPE to its position.

    Args:
        pool: [P, 16, 2*D], written in place; of `dtype`, or float8_e4m3fn, where what exceeds 448 becomes that.
        rows: uint8 [N, bytes] in CPU memory, pinned if the pool is on CUDA: K before RoPE and V, as `Codec.encode`
            gives them in "higgs4", or in "auto" if `grid` is None.
        source, position, dest: int64 [n], contiguous: of each token its row, -1 for nothing, its position in the
            sequence and its token slot. Slots must not repeat.
        frequencies: float32 [r / 2]: by how much a position turns pair (i, i + r / 2).
        grid: float16 [256, 2], the grid of 4 bits; or None.
        dtype: of K and V: float32, bfloat16 or float16.
        count: int32 [1] on the pool's device: only so many first tokens are fetched, at most n; None: all.

    Raises:
        RuntimeError: wrong shapes, dtypes or devices.
        IndexError: on the CPU, a row or slot that is not there. On CUDA it stops the kernel.
    """
    load_library()
    torch.ops.vllm_kvplug.fetch_tokens(pool, rows, source, position, dest, frequencies, grid, dtype, count)
