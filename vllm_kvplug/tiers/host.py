"""The host tier of one rank: a fixed pool of slots in (pinned) CPU memory, each 64 tokens of K and V of some heads."""

from __future__ import annotations

import torch

from vllm_kvplug.tiers.codecs import Codec
from vllm_kvplug.tiers.ledger import HOST_SLOT


class HostPool:
    """`slots` slots of encoded tokens, [slots, heads, 64, token bytes] uint8. Which are free is kept here.

    heads: that share a slot. One where heads offload as they please; all of a rank where all of them do.
    """

    def __init__(self, slots: int, codec: Codec, pin: bool, heads: int = 1):
        self.codec = codec
        self.slots = slots
        self.rows = torch.empty((slots * heads * HOST_SLOT, codec.token_bytes), dtype=torch.uint8, pin_memory=pin)
        self._free = list(range(slots - 1, -1, -1))

    @property
    def used(self) -> int:
        return self.slots - len(self._free)

    def allocate(self, heads: int, slots_per_head: int) -> torch.Tensor:
        """Slots for each head, int64 [heads, slots per head] on the CPU. The scheduler's ledger says they are there."""
        count = heads * slots_per_head
        if count > len(self._free):
            raise RuntimeError(f"host tier: {count} slots asked for, {len(self._free)} free")
        taken = [self._free.pop() for _ in range(count)]
        return torch.tensor(taken, dtype=torch.int64).view(heads, slots_per_head)

    def release(self, slots: torch.Tensor) -> None:
        self._free.extend(slots.flatten().tolist())

    def write(self, slots: torch.Tensor, start: int, encoded: torch.Tensor) -> None:
        """Store tokens [start, start + t) of each head. slots [heads, n]; encoded uint8 [heads, t, token bytes]."""
        index = _rows(slots, torch.arange(start, start + encoded.shape[1]))
        self.rows[index] = encoded.cpu()

    def read(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """K and V of one head's tokens at `positions` int64 [n] on the CPU, [n, 2 * head_dim]. slots [n slots]."""
        return self.codec.decode(self.rows[_rows(slots[None], positions)[0]])


def _rows(slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rows of the pool, int64 [heads, n], of tokens at `positions` [n] of heads with `slots` [heads, slots]."""
    return slots[:, positions // HOST_SLOT] * HOST_SLOT + positions % HOST_SLOT


class Staging:
    """Device memory where fetched tokens wait for the step in which they land, [tokens, 2 * head_dim].

    Every copy in flight has a range of its own; ranges are taken first fit.
    """

    def __init__(self, tokens: int, head_dim: int, dtype: torch.dtype, device: torch.device):
        self.buffer = torch.empty((tokens, 2 * head_dim), dtype=dtype, device=device)
        self._taken: list[tuple[int, int]] = []

    def take(self, tokens: int) -> slice | None:
        """A free range of the buffer, or None if there is none."""
        start = 0
        for index, (begin, end) in enumerate([*self._taken, (len(self.buffer), 0)]):
            if begin - start >= tokens:
                self._taken.insert(index, (start, start + tokens))
                return slice(start, start + tokens)
            start = end
        return None

    def give_back(self, taken: slice) -> None:
        self._taken.remove((taken.start, taken.stop))
