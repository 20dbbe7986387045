"""The host pool and the staging buffer against dictionaries and lists."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvplug.tiers.codecs import Codec
from vllm_kvplug.tiers.host import HostPool, Staging, rows_of

CPU = torch.device("cpu")


def make_pool(slots: int, head_dim: int = 1) -> HostPool:
    return HostPool(slots, Codec("auto", head_dim, torch.float32), pin=False)


def read(pool: HostPool, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """K and V of one head's tokens, [n, 2 * head_dim]."""
    out = torch.full((len(positions), 2 * pool.codec.head_dim), torch.nan, dtype=pool.codec.dtype)
    pool.read(rows_of(slots[positions // 64], positions), out)
    return out


def numbers(pool: HostPool, heads: int, tokens: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct contents, [heads, tokens], and how they lie on the host: K is the number and V its negative."""
    content = torch.arange(first, first + heads * tokens, dtype=torch.float32).view(heads, tokens)
    return content, pool.codec.encode(content[..., None], -content[..., None])


# ---------------------------------------------------------------------------------------------------- pool


@pytest.mark.parametrize("name, head_dim, row", [("auto", 3, 24), ("fp8", 3, 10), ("higgs4", 64, 68)])
def test_a_pool_is_as_large_as_its_slots(name: str, head_dim: int, row: int):
    pool = HostPool(5, Codec(name, head_dim, torch.float32), pin=False)
    assert pool.rows.shape == (5 * 64, row) and pool.rows.dtype == torch.uint8
    assert (pool.slots, pool.used) == (5, 0)


def test_slots_have_one_owner():
    pool = make_pool(10)
    first, second = pool.allocate(2, 3), pool.allocate(1, 4)
    assert first.shape == (2, 3) and second.shape == (1, 4) and first.dtype == torch.int64
    assert sorted([*first.flatten().tolist(), *second.flatten().tolist()]) == list(range(10))
    assert pool.used == 10


def test_a_full_pool_says_so_and_stays_as_it_was():
    pool = make_pool(7)
    slots = pool.allocate(3, 2)
    with pytest.raises(RuntimeError, match="host tier: 2 slots asked for, 1 free"):
        pool.allocate(1, 2)
    assert pool.used == 6
    pool.allocate(1, 1)
    pool.release(slots)
    assert pool.used == 1
    again = pool.allocate(2, 3)
    assert sorted(again.flatten().tolist()) == sorted(slots.flatten().tolist())


@pytest.mark.parametrize("heads, per_head", [(0, 3), (2, 0), (0, 0)])
def test_a_rank_may_need_no_slots(heads: int, per_head: int):
    pool = make_pool(4)
    slots = pool.allocate(heads, per_head)
    assert slots.shape == (heads, per_head) and pool.used == 0
    pool.release(slots)
    assert pool.used == 0


@pytest.mark.parametrize("start, tokens", [(0, 1), (0, 64), (63, 1), (63, 2), (64, 64), (60, 80), (0, 192), (191, 1)])
def test_writes_over_slot_borders(start: int, tokens: int):
    """The pool is filled with another owner's tokens first; only those of the write may change."""
    pool = make_pool(8)
    other, mine = pool.allocate(1, 2), pool.allocate(2, 3)
    before, encoded = numbers(pool, 2, 192, 1000)
    pool.write(mine, 0, encoded)
    others, encoded = numbers(pool, 1, 128, 5000)
    pool.write(other, 0, encoded)
    content, encoded = numbers(pool, 2, tokens, 0)
    pool.write(mine, start, encoded)
    before[:, start : start + tokens] = content
    for head in range(2):
        expected = torch.stack([before[head], -before[head]], -1)
        assert torch.equal(read(pool, mine[head], torch.arange(192)), expected)
    assert torch.equal(read(pool, other[0], torch.arange(128))[:, 0], others[0])


def test_positions_are_read_in_the_order_asked():
    pool = make_pool(4, head_dim=2)
    slots = pool.allocate(2, 2).flip(1)  # any order of slots is a head's
    key, value = torch.randn(2, 100, 2), torch.randn(2, 100, 2)
    pool.write(slots, 0, pool.codec.encode(key, value))
    where = torch.tensor([64, 3, 99, 63, 3, 0])
    for head in range(2):
        found = read(pool, slots[head], where)
        assert found.dtype == torch.float32 and torch.equal(found, torch.cat([key, value], -1)[head, where])
    assert read(pool, slots[0], where[:0]).shape == (0, 4)


def test_there_is_nothing_beyond_a_heads_slots():
    pool = make_pool(4)
    slots = pool.allocate(1, 1)
    _, encoded = numbers(pool, 1, 2, 0)
    with pytest.raises(IndexError):
        pool.write(slots, 63, encoded)
    with pytest.raises(IndexError):
        read(pool, slots[0], torch.tensor([64]))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_pool_is_a_dictionary(data: st.DataObject):
    """Requests come, write chunk after chunk or anywhere, read, and go; nobody sees another's tokens."""
    pool, written = make_pool(12), 0
    live: list[tuple[torch.Tensor, list[dict[int, float]]]] = []
    for _ in range(data.draw(st.integers(1, 25), "steps")):
        action = data.draw(st.sampled_from(["begin", "write", "write", "read", "end"]))
        if action == "begin":
            heads, per_head = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 3))
            free = 12 - sum(slots.numel() for slots, _ in live)
            if heads * per_head <= free:
                live.append((pool.allocate(heads, per_head), [{} for _ in range(heads)]))
            else:
                with pytest.raises(RuntimeError, match=f"{heads * per_head} slots asked for, {free} free"):
                    pool.allocate(heads, per_head)
        elif live:
            index = data.draw(st.integers(0, len(live) - 1))
            slots, stored = live[index]
            most = 64 * slots.shape[1]
            if action == "write":
                start = data.draw(st.one_of(st.integers(0, most - 1), st.sampled_from([0, 63, 64, 127]))) % most
                tokens = data.draw(st.integers(1, most - start))
                content, encoded = numbers(pool, len(stored), tokens, written)
                pool.write(slots, start, encoded)
                written += content.numel()
                for head, row in zip(stored, content.tolist(), strict=True):
                    head.update(zip(range(start, start + tokens), row, strict=True))
            elif action == "end":
                pool.release(live.pop(index)[0])
        assert pool.used == sum(slots.numel() for slots, _ in live)
        for slots, stored in live if action == "read" else []:
            for row, head in zip(slots, stored, strict=True):
                where = data.draw(st.permutations(sorted(head)))[:40]
                found = read(pool, row, torch.tensor(where, dtype=torch.int64)).tolist()
                assert found == [[head[t], -head[t]] for t in where]
    for slots, _ in live:
        pool.release(slots)
    assert sorted(pool.allocate(3, 4).flatten().tolist()) == list(range(12))


# ------------------------------------------------------------------------------------------------- staging


def first_fit(taken: list[bool], tokens: int) -> slice | None:
    for start in range(len(taken) - tokens + 1):
        if not any(taken[start : start + tokens]):
            return slice(start, start + tokens)
    return None


def test_staging_by_hand():
    staging = Staging(10, 3, torch.float16, CPU)
    assert staging.buffer.shape == (10, 6) and staging.buffer.dtype == torch.float16
    a, b, c = staging.take(4), staging.take(3), staging.take(2)
    assert (a, b, c) == (slice(0, 4), slice(4, 7), slice(7, 9))
    assert staging.take(2) is None and staging.take(1) == slice(9, 10)
    staging.give_back(b)
    assert staging.take(4) is None, "a hole is no larger than what left it"
    assert staging.take(2) == slice(4, 6) and staging.take(1) == slice(6, 7)
    with pytest.raises(ValueError):
        staging.give_back(slice(4, 7))


@pytest.mark.parametrize("tokens", [0, 10])
def test_nothing_always_fits(tokens: int):
    """A rank without satellites of a cluster stages nothing."""
    staging = Staging(tokens, 1, torch.float32, CPU)
    assert staging.take(tokens) == slice(0, tokens)
    empty = staging.take(0), staging.take(0)
    assert empty == (slice(0, 0), slice(0, 0))
    assert staging.take(1) is None
    staging.give_back(slice(0, tokens))
    assert staging.take(tokens) == slice(0, tokens)


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 40), st.data())
def test_staging_takes_the_first_range_that_fits(size: int, data: st.DataObject):
    staging, taken, live = Staging(size, 1, torch.float32, CPU), [False] * size, []
    for _ in range(data.draw(st.integers(1, 40), "steps")):
        if live and data.draw(st.booleans()):
            gone = live.pop(data.draw(st.integers(0, len(live) - 1)))
            staging.give_back(gone)
            taken[gone] = [False] * (gone.stop - gone.start)
        else:
            tokens = data.draw(st.one_of(st.integers(0, 6), st.integers(0, size + 1)))
            found = staging.take(tokens)
            assert found == first_fit(taken, tokens)
            if found is not None:
                taken[found] = [True] * tokens
                live.append(found)
    for left in live:
        staging.give_back(left)
    assert staging.take(size) == slice(0, size)
