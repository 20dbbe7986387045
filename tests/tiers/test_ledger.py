"""The scheduler's book of host memory."""

from __future__ import annotations

import pytest

from vllm_kvplug.tiers.ledger import HOST_SLOT, HostLedger, host_slots


@pytest.mark.parametrize("tokens, slots", [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (128, 2), (129, 3)])
def test_host_slots(tokens: int, slots: int):
    assert HOST_SLOT == 64
    assert [host_slots(heads, tokens) for heads in (0, 1, 7)] == [0, slots, 7 * slots]


def test_reservations_up_to_the_last_slot():
    ledger = HostLedger(10)
    ledger.reserve("a", 4)
    ledger.reserve("b", 0)
    ledger.reserve("c", 5)
    assert ledger.used == 9
    assert [ledger.fits(slots) for slots in (0, 1, 2)] == [True, True, False]
    with pytest.raises(RuntimeError, match="2 slots asked for, 1 free"):
        ledger.reserve("d", 2)
    assert ledger.used == 9
    ledger.reserve("d", 1)
    assert ledger.used == 10 and ledger.fits(0) and not ledger.fits(1)


def test_what_is_released_is_free_again():
    ledger = HostLedger(5)
    ledger.reserve("a", 3)
    ledger.reserve("b", 2)
    ledger.release("a")
    assert ledger.used == 2 and ledger.fits(3) and not ledger.fits(4)
    ledger.release("a")  # of a request that has nothing
    ledger.release("never seen")
    assert ledger.used == 2
    ledger.reserve("a", 3)
    ledger.release("b")
    ledger.release("a")
    assert ledger.used == 0


def test_no_host_tier():
    ledger = HostLedger(0)
    ledger.reserve("a", 0)
    assert ledger.fits(0) and not ledger.fits(1)
