"""Decode attention on Hopper GPUs: the plan and the launch of csrc/cuda/decode_attention.cuh."""

from __future__ import annotations

import torch

PART_INTS = 8
MOST_GROUP = 8


def runs_here(kv_heads: int, query_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel takes such heads on this device: up to 8 query heads a KV head, head size 64, 128 or 256."""
    fits = dim in (64, 128, 256) and query_heads <= MOST_GROUP * kv_heads
    return fits and dtype in (torch.bfloat16, torch.float16) and torch.cuda.get_device_capability(device)[0] == 9


class HopperPlan:
    """Equal parts of the pages of up to `rows` rows in every layer, one part a multiprocessor; see ops.decode_plan.

    Attributes, all on one device: parts int32 [layers, blocks, 8], starts int32 [layers, rows * KV heads + 1], partial
    float32 [2 * blocks, G, D] and sums float32 [2 * blocks, G, 2] of heads that several blocks share, arrived int32
    [rows * KV heads], zero between launches.
    """

    def __init__(
        self,
        rows: int,
        layers: int,
        kv_heads: int,
        query_heads: int,
        dim: int,
        device: torch.device,
        blocks: int | None = None,
    ):
        self._rows, self._kv_heads, group = rows, kv_heads, query_heads // kv_heads
        if blocks is None:
            blocks = torch.cuda.get_device_properties(device).multi_processor_count
        self.parts = torch.zeros((layers, blocks, PART_INTS), dtype=torch.int32, device=device)
        self.starts = torch.zeros((layers, rows * kv_heads + 1), dtype=torch.int32, device=device)
        self.partial = torch.empty((2 * blocks, group, dim), dtype=torch.float32, device=device)
        self.sums = torch.empty((2 * blocks, group, 2), dtype=torch.float32, device=device)
        self.arrived = torch.zeros(rows * kv_heads, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        tensors = (self.parts, self.starts, self.partial, self.sums, self.arrived)
        return sum(tensor.nbytes for tensor in tensors)

    def update(self, row_slot: torch.Tensor, lengths: torch.Tensor) -> None:
        """Plan all layers. row_slot int32 [rows], -1 for padding; lengths int32 [slots, layers * KV heads]."""
        if not 0 < len(row_slot) <= self._rows:
            raise ValueError(f"decode_attention: the plan is for 1 to {self._rows} rows, got {len(row_slot)}")
        _load()
        torch.ops.vllm_kvplug.decode_plan(self.parts, self.starts, row_slot, lengths, self._kv_heads)

    def attend(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        pool: torch.Tensor,
        directory: torch.Tensor,
        chunks: torch.Tensor,
        row_slot: torch.Tensor,
        lengths: torch.Tensor,
        first_head: int,
        scale: float,
        scales: torch.Tensor | None = None,
    ) -> None:
        """One layer; see ops.decode_attention. scales: float32 [2, KV heads] of K and V in an e4m3 pool."""
        tables = (directory, chunks, row_slot, lengths)
        plan = (self.parts, self.starts, self.partial, self.sums, self.arrived)
        where = (first_head, self._kv_heads, scale)
        torch.ops.vllm_kvplug.decode_attention_planned(out, query, pool, *tables, *where, *plan, scales)


def _load() -> None:
    from vllm_kvplug import ops

    ops.load_library()
