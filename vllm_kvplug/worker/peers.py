"""What tensor-parallel ranks tell each other about drift: a pivot and its satellites may lie on different ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from vllm.distributed import get_tp_group


class TensorParallelPeers:
    """`worker.retrieval.Peers` over vLLM's tensor-parallel group, on the CPU side."""

    def __init__(self) -> None:
        group = get_tp_group()
        self._group, self._ranks = group.cpu_group, group.ranks

    def any(self, flags: torch.Tensor) -> torch.Tensor:
        found = flags.to(torch.uint8)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return found.bool()

    def share(self, values: torch.Tensor, owner: int) -> torch.Tensor:
        values = values.contiguous()
        dist.broadcast(values, src=self._ranks[owner], group=self._group)
        return values
