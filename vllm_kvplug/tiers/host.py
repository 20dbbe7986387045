"""The host tier of one rank: a fixed pool of slots in (pinned) CPU memory, each 64 tokens of K and V of some heads."""

from __future__ import annotations

import torch

from vllm_kvplug import ops
from vllm_kvplug.tiers.codecs import Codec
from vllm_kvplug.tiers.ledger import HOST_SLOT

READ_BYTES = 64 << 20
"""Encoded bytes that a read takes to the device before it decodes them."""


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
        """Store tokens [start, start + t) of each head. slots [heads, n]; encoded uint8 [heads, t, token bytes].

        Both are on one device; on a GPU the copy is queued on its current stream.
        """
        position = torch.arange(start, start + encoded.shape[1], device=slots.device)
        index = rows_of(slots[:, position // HOST_SLOT], position)
        ops.scatter_rows(self.rows, encoded.flatten(0, 1), index.flatten())

    def read(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """K and V of the tokens in `rows` int64 [n] of the pool, into `out` [n, 2 * head_dim], on one device."""
        some = READ_BYTES // self.codec.token_bytes
        for index, target in zip(rows.split(some), out.split(some), strict=True):
            encoded = torch.empty((len(index), self.codec.token_bytes), dtype=torch.uint8, device=out.device)
            ops.gather_rows(encoded, self.rows, index)
            target.copy_(self.codec.decode(encoded))


def rows_of(slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rows of the pool of tokens at `positions`, whose slots are `slots`; int64, they broadcast."""
    return slots * HOST_SLOT + positions % HOST_SLOT


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
