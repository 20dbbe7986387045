"""The scheduler's book of host memory: a second resource beside blocks, reserved when a request is admitted."""

from __future__ import annotations

from vllm_kvplug.plan import ceil_div

HOST_SLOT = 64
"""Tokens of one head in a host slot, the unit of host memory."""


def host_slots(heads: int, tokens: int) -> int:
    """Slots for `tokens` tokens of each of `heads` heads."""
    return heads * ceil_div(tokens, HOST_SLOT)


class HostLedger:
    """Who has reserved how many of `capacity` slots. Every rank has its own pool of that size."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._reserved: dict[str, int] = {}

    @property
    def used(self) -> int:
        return sum(self._reserved.values())

    def fits(self, slots: int) -> bool:
        return self.used + slots <= self.capacity

    def reserve(self, request_id: str, slots: int) -> None:
        """Reserve once for the request's life. Raises RuntimeError if it does not fit: ask `fits` first."""
        if not self.fits(slots):
            raise RuntimeError(f"host tier: {slots} slots asked for, {self.capacity - self.used} free")
        self._reserved[request_id] = slots

    def release(self, request_id: str) -> None:
        self._reserved.pop(request_id, None)
