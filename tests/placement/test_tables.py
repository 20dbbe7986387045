"""Page tables and the pool on cases small enough to check by hand."""

from __future__ import annotations

import pytest
import torch

from vllm_kvplug.placement.integrity import check_integrity, head_pages, kept_positions
from vllm_kvplug.placement.pool import PagePool
from vllm_kvplug.placement.tables import CHUNK, PageTables, TableSizes
from vllm_kvplug.plan import PagePlan, ceil_div
from vllm_kvplug.policies.base import Ring
from vllm_kvplug.shape import PAGE, ModelShape
from vllm_kvplug.worker.attention import ring_positions

UNBOUNDED = 1 << 30
BORDER = PAGE * CHUNK  # tokens of a head in one chunk


def make_tables(heads: int = 2, max_tokens: int = 3 * BORDER, slots: int = 4, blocks: int = 256) -> PageTables:
    return PageTables(TableSizes(slots, heads, max_tokens, blocks), "cpu")


def make_pool(tables: PageTables) -> PagePool:
    """A pool with head_dim 1 and integer content; -1 is what nobody wrote."""
    return PagePool(torch.full((tables.sizes.blocks * tables.sizes.heads, PAGE, 2), -1, dtype=torch.int64))


def row_of(*blocks: int) -> torch.Tensor:
    return torch.tensor([blocks], dtype=torch.int32)


def append_at(tables: PageTables, slot: int, row: torch.Tensor, position: int, sinks=0, ring=UNBOUNDED):
    """Places of one new token in every head, [heads]."""
    return tables.append(torch.tensor([slot]), row, torch.tensor([position]), sinks, ring)[0]


def snapshot(tables: PageTables) -> dict[str, torch.Tensor]:
    """Everything that is read; the spare last rows, columns and entries are left out."""
    return {
        "directory": tables.directory[:-1, :, :-1].clone(),
        "chunks": tables.chunks[:-1].clone(),
        "lengths": tables.lengths[:-1].clone(),
        "positions": tables.positions[:-1].clone(),
        "free": tables._free_chunks[: int(tables._num_free)].clone(),
        "taken": tables._taken[:-1].clone(),
        "first_row": tables._first_row[:-1].clone(),
        "num_left": tables._num_left[:-1].clone(),
    }


def assert_same(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    for name, value in before.items():
        assert torch.equal(value, after[name]), name


def all_free(tables: PageTables) -> bool:
    return sorted(tables._free_chunks[: int(tables._num_free)].tolist()) == list(range(tables.sizes.chunks))


# ------------------------------------------------------------------------------------------- growing


def test_heads_that_grow_alike_share_a_block():
    tables, row = make_tables(heads=3), row_of(5, 9, 2)
    found = tables.extend(0, row, 0, 40, 0, UNBOUNDED)
    for head in range(3):
        assert head_pages(tables, 0, head) == [5 * 3 + head, 9 * 3 + head, 2 * 3 + head]
        assert found[:, head].tolist() == [[5, 9, 2][t // PAGE] * 48 + head * PAGE + t % PAGE for t in range(40)]
    check_integrity(tables, {0: [5, 9, 2]})


def test_ragged_growth_is_page_major():
    tables, row = make_tables(heads=3), row_of(5, 9)
    tables.grow(torch.tensor([1]), row, torch.tensor([[2, 0, 3]]), 3)
    tables.lengths[1] = torch.tensor([32, 0, 48])
    assert head_pages(tables, 1, 0) == [15, 17]  # taken first and third
    assert head_pages(tables, 1, 2) == [16, 27, 28]  # second, fourth and fifth: into the next block


def test_rows_grow_independently():
    tables = make_tables(heads=2)
    rows = torch.tensor([[3, 0], [7, 8]], dtype=torch.int32)
    tables.grow(torch.tensor([2, 0]), rows, torch.tensor([[1, 0], [1, 2]]), 2)
    tables.lengths[2], tables.lengths[0] = torch.tensor([16, 0]), torch.tensor([16, 32])
    assert (head_pages(tables, 2, 0), head_pages(tables, 2, 1)) == ([6], [])
    assert (head_pages(tables, 0, 0), head_pages(tables, 0, 1)) == ([14], [15, 16])


def test_append_takes_a_page_every_16_tokens():
    tables, row = make_tables(), row_of(4, 6)
    for position in range(18):
        found = append_at(tables, 0, row, position)
        block = 4 if position < PAGE else 6
        assert found.tolist() == [(block * 2 + head) * PAGE + position % PAGE for head in range(2)]
        assert tables.lengths[0].tolist() == [position + 1] * 2
    assert kept_positions(tables, 0) == [list(range(18))] * 2


def test_append_equals_extend():
    one, many, row = make_tables(), make_tables(), row_of(4, 6, 1)
    at_once = many.extend(0, row, 0, 37, 0, UNBOUNDED)
    singly = torch.stack([append_at(one, 0, row, position) for position in range(37)])
    assert torch.equal(singly, at_once)
    assert_same(snapshot(one), snapshot(many))


def test_first_tokens_of_a_second_chunk():
    """The page table of a head goes on in a new chunk at 1,024 tokens."""
    blocks = list(range(1, 67))
    tables, row = make_tables(), row_of(*blocks)
    tables.extend(0, row, 0, BORDER - 1, 0, UNBOUNDED)
    free = int(tables._num_free)
    last = append_at(tables, 0, row, BORDER - 1)
    assert int(tables._num_free) == free
    first = append_at(tables, 0, row, BORDER)
    assert int(tables._num_free) == free - 2
    assert last.tolist() == [(64 * 2 + head) * PAGE + 15 for head in range(2)]
    assert first.tolist() == [(65 * 2 + head) * PAGE for head in range(2)]
    check_integrity(tables, {0: blocks})
    tables.free([0])
    assert all_free(tables)


@pytest.mark.parametrize("end", [BORDER - 1, BORDER, BORDER + 1, 2 * BORDER, 2 * BORDER + 1])
def test_extend_over_a_chunk_border(end: int):
    blocks = list(range(200, 200 - ceil_div(end, PAGE), -1))
    tables, row = make_tables(), row_of(*blocks)
    found = tables.extend(0, row, 0, end, 0, UNBOUNDED)
    index = torch.arange(end)
    expected = torch.tensor(blocks)[index // PAGE][:, None] * 32 + torch.arange(2) * PAGE + index[:, None] % PAGE
    assert torch.equal(found, expected)
    check_integrity(tables, {0: blocks})


# ---------------------------------------------------------------------------------------------- rings


def test_ring_overwrites_the_oldest_behind_the_sinks():
    tables, row = make_tables(heads=1), row_of(3, 8)
    places = [int(append_at(tables, 0, row, position, 2, 20)) for position in range(60)]
    assert places[:20] == [3 * PAGE + t if t < PAGE else 8 * PAGE + t - PAGE for t in range(20)]
    assert places[20:] == [places[2 + t % 18] for t in range(18, 58)]
    assert tables.lengths[0].tolist() == [20]
    assert kept_positions(tables, 0) == [[0, 1, *range(42, 60)]]


@pytest.mark.parametrize("sinks, window", [(0, 1), (0, 16), (4, 12), (3, 30), (17, 1), (5, 64)])
def test_ring_order_is_what_attention_expects(sinks: int, window: int):
    ring, tables, row = Ring(sinks, window), make_tables(heads=1), row_of(1, 2, 3, 4, 5)
    for position in range(150):
        append_at(tables, 0, row, position, sinks, ring.tokens)
        stored = int(tables.lengths[0, 0])
        slots = tables.locate(torch.tensor(0), torch.tensor(0), torch.arange(stored))
        positions = tables.positions.flatten()[slots]
        assert torch.equal(positions.long(), ring_positions(stored, position + 1, ring, torch.device("cpu")))


RINGS = [(0, UNBOUNDED), (0, 1), (0, 7), (0, 16), (4, 20), (16, 32), (3, 100), (20, 21)]


@pytest.mark.parametrize("sinks, ring", RINGS)
@pytest.mark.parametrize(
    "cuts", [[1, 2, 3], [16, 32, 48], [5, 90], [70], [1, 17, 18, 19, 60], [99], list(range(1, 100))], ids=str
)
def test_chunked_extend_equals_extend_at_once(sinks: int, ring: int, cuts: list[int]):
    """A chunk may be longer than the ring. What the tables hold must not depend on where a prompt was cut."""
    end, row = 100, row_of(9, 4, 7, 1, 12, 3, 8)
    whole, chunked = make_tables(), make_tables()
    memory, chunk_memory = make_pool(whole), make_pool(chunked)
    at_once = whole.extend(0, row, 0, end, sinks, ring)
    write(memory, at_once, range(end))
    for start, stop in zip([0, *cuts], [*cuts, end], strict=True):
        found = chunked.extend(0, row, start, stop, sinks, ring)
        assert found.shape == (stop - start, 2)
        write(chunk_memory, found, range(start, stop))
    assert_same(snapshot(whole), snapshot(chunked))
    index = torch.arange(min(end, ring))
    slots = whole.locate(torch.tensor(0), torch.arange(2)[:, None], index)
    for one, other in zip(memory.gather(slots), chunk_memory.gather(slots), strict=True):
        assert torch.equal(one, other)
    window = ring - sinks
    kept = [p for p in range(end) if p < sinks or p >= end - window]
    assert kept_positions(whole, 0) == [kept] * 2
    assert (at_once[:, 0] >= 0).nonzero().flatten().tolist() == kept


@pytest.mark.parametrize("sinks, ring", RINGS)
def test_decoding_goes_on_where_a_prompt_ended(sinks: int, ring: int):
    """Extend and append agree on the turn of the ring, whichever of them a token went through."""
    row = row_of(9, 4, 7, 1, 12, 3, 8)
    expected = make_tables()
    for position in range(100):
        append_at(expected, 0, row, position, sinks, ring)
    for split in (1, 15, 16, 17, 40, 99):
        tables = make_tables()
        tables.extend(0, row, 0, split, sinks, ring)
        for position in range(split, 100):
            append_at(tables, 0, row, position, sinks, ring)
        assert kept_positions(tables, 0) == kept_positions(expected, 0)
        assert_same(snapshot(expected), snapshot(tables))


def write(pool: PagePool, places: torch.Tensor, values: range) -> None:
    """K = position, V = 1000 + position at places [tokens, heads]."""
    tokens = pool.pages.view(-1, 2)
    for place, value in zip(places, values, strict=True):
        for slot in place.tolist():
            if slot >= 0:
                tokens[slot] = torch.tensor([value, 1000 + value])


# ----------------------------------------------------------------------------------------- padding rows


@pytest.mark.parametrize("ring", [UNBOUNDED, 20, 16])
def test_padding_rows_change_nothing(ring: int):
    tables, row = make_tables(), row_of(4, 6, 7, 0)
    tables.extend(1, row, 0, 32, 0, ring)
    before = snapshot(tables)
    slots = torch.full((3,), -1)
    rows = torch.zeros((3, 4), dtype=torch.int32)
    for position in (-1, 0, 16, 33):
        found = tables.append(slots, rows, torch.full((3,), position), 0, ring)
        assert (found == -1).all()
        keep = torch.ones(3, 2, dtype=torch.bool)
        source, target = tables.promote(slots, rows, torch.full((3,), position), keep)
        assert (source == -1).all() and (target == -1).all()
    assert_same(before, snapshot(tables))
    assert not tables.lengths[-1].any() and int(tables._taken[-1]) == 0


@pytest.mark.parametrize("sinks, ring", [(0, UNBOUNDED), (4, 20), (0, 1), (16, 32)])
@pytest.mark.parametrize("position", [-(1 << 31), -17, 3 * BORDER, (1 << 30) + 5, (1 << 31) - 1])
def test_padding_rows_with_garbage_index_nothing(sinks: int, ring: int, position: int):
    """A captured graph's spare rows hold whatever vLLM left there, as positions and as block ids."""
    tables, blocks = make_tables(), row_of(4, 6, 7, 0)
    tables.extend(1, blocks, 0, 20, sinks, ring)
    reference = make_tables()
    reference.extend(1, blocks, 0, 20, sinks, ring)
    slots = torch.tensor([1, -1, -1])
    rows = torch.cat([blocks, torch.full((2, 4), 1 << 20, dtype=torch.int32)])
    positions = torch.tensor([20, position, position], dtype=torch.int32)
    found = tables.append(slots, rows, positions, sinks, ring)
    assert torch.equal(found[0], append_at(reference, 1, blocks, 20, sinks, ring))
    assert (found[1:] == -1).all()
    assert_same(snapshot(reference), snapshot(tables))
    check_integrity(tables, {1: [4, 6, 7]})


def test_padding_rows_between_live_ones():
    alone, mixed, row = make_tables(), make_tables(), row_of(4, 6)
    for position in range(20):
        expected = append_at(alone, 2, row, position)
        rows = torch.stack([torch.zeros(2), row[0], torch.zeros(2)]).int()
        found = mixed.append(torch.tensor([-1, 2, -1]), rows, torch.tensor([5, position, 0]), 0, UNBOUNDED)
        assert torch.equal(found[1], expected) and (found[[0, 2]] == -1).all()
    assert_same(snapshot(alone), snapshot(mixed))


def test_a_position_of_minus_one_is_nowhere():
    tables = make_tables()
    before = tables.positions[:-1].clone()
    tables.set_positions(torch.tensor([-1, 40, -1]), torch.tensor([3, 4, 5]))
    before.view(-1)[40] = 4
    assert torch.equal(tables.positions[:-1], before)


def test_positions_are_put_where_they_are_set():
    one, other = make_tables(), make_tables()
    slots, positions = torch.randperm(one.positions.numel() - 16)[:50], torch.randint(1 << 30, (50,))
    one.set_positions(slots, positions)
    other.put_positions(slots, positions.int())
    assert torch.equal(one.positions, other.positions)


# ------------------------------------------------------------------------------------------- promoting


def promote_and_append(
    tables: PageTables, pool: PagePool, row: torch.Tensor, position: int, ring: Ring, keep: list[bool]
) -> None:
    """One decode step of a full ring, as a policy with lazy promotion would run it."""
    victim = ring.sinks + (position - ring.sinks) % ring.window
    source, target = tables.promote(torch.tensor([0]), row, torch.tensor([victim]), torch.tensor([keep]))
    assert ((source >= 0) == torch.tensor([keep])).all() and ((target >= 0) == torch.tensor([keep])).all()
    moving = source >= 0
    pool.copy_tokens(source[moving], target[moving])
    write(pool, append_at(tables, 0, row, position, ring.sinks, ring.tokens)[None], range(position, position + 1))


@pytest.mark.parametrize("ring", [Ring(0, 16), Ring(2, 6), Ring(4, 29), Ring(0, 1)], ids=str)
def test_promoted_victims_outlive_the_window(ring: Ring):
    """Heads promote at different times: the first all, the second every third, the third none."""
    tables, blocks = make_tables(heads=3), list(range(1, 20))
    pool, row = make_pool(tables), row_of(*blocks)
    write(pool, tables.extend(0, row, 0, ring.tokens, ring.sinks, ring.tokens), range(ring.tokens))
    expected: list[set[int]] = [set(range(ring.tokens)) for _ in range(3)]
    for position in range(ring.tokens, ring.tokens + 200):
        victim = position - ring.window
        keep = [True, victim % 3 == 0, False]
        promote_and_append(tables, pool, row, position, ring, keep)
        for head in range(3):
            expected[head].add(position)
            if not keep[head]:
                expected[head].discard(victim)
        assert kept_positions(tables, 0) == [sorted(head) for head in expected]
        assert tables.lengths[0].tolist() == [len(head) for head in expected]
    check_integrity(tables, {0: blocks})
    for head in range(3):
        count = int(tables.lengths[0, head])
        slots = tables.locate(torch.tensor(0), torch.tensor(head), torch.arange(count))
        key, value = pool.gather(slots)
        positions = tables.positions.flatten()[slots].long()
        assert torch.equal(key[:, 0], positions) and torch.equal(value[:, 0], positions + 1000)
        assert positions[ring.tokens :].tolist() == sorted(positions[ring.tokens :].tolist())  # in order of promotion
    tables.free([0])
    assert all_free(tables)


def test_promotion_over_a_chunk_border():
    ring, blocks = Ring(4, 12), list(range(1, 120))
    tables = make_tables(heads=2)
    pool, row = make_pool(tables), row_of(*blocks)
    write(pool, tables.extend(0, row, 0, 16, 4, 16), range(16))
    for position in range(16, BORDER + 20):  # the second head starts late and stays in its first chunk
        promote_and_append(tables, pool, row, position, ring, [True, position >= 900])
        if position in (BORDER - 1, BORDER, BORDER + 1):
            check_integrity(tables, {0: blocks})
    assert kept_positions(tables, 0) == [
        list(range(BORDER + 20)),
        [*range(4), *range(900 - 12, BORDER + 20)],
    ]
    assert (tables.directory[0, :, :2] >= 0).tolist() == [[True, True], [True, False]]


# ----------------------------------------------------------------------------- compacting and shrinking


def compact_and_shrink(
    tables: PageTables, pool: PagePool, row: torch.Tensor, chosen: list[list[int]], before: int, after: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The end of slot 0's prompt: every head's `chosen` tokens to its front, then pages into fewer blocks."""
    slot = 0
    for head, keep in enumerate(chosen):
        stored = tables.locate(torch.tensor(slot), torch.tensor(head), torch.arange(int(tables.lengths[slot, head])))
        source, target = stored[keep], stored[: len(keep)]
        pool.copy_tokens(source, target)
        tables.set_positions(target, torch.tensor(keep))
    kept = [len(keep) for keep in chosen]
    source, target = tables.shrink(slot, row, torch.tensor(kept), before, after, max(kept))
    moved = source > 0
    assert set(source[moved].tolist()).isdisjoint(target.tolist()) and not target[~moved].any()
    pool.copy_pages(source, target)
    return source[moved], target[moved]


def read_back(tables: PageTables, pool: PagePool, slot: int, head: int) -> list[tuple[int, int, int]]:
    """(position, K, V) in storage order."""
    slots = tables.locate(torch.tensor(slot), torch.tensor(head), torch.arange(int(tables.lengths[slot, head])))
    key, value = pool.gather(slots)
    return list(zip(tables.positions.flatten()[slots].tolist(), key[:, 0].tolist(), value[:, 0].tolist(), strict=True))


KEEPS = {
    "one head keeps all": [100, 1, 1, 1],
    "all keep one": [1, 1, 1, 1],
    "all keep all": [100, 100, 100, 100],
    "ragged": [77, 3, 33, 16],
    "all but one keep all": [100, 100, 1, 100],
    "page multiples": [96, 16, 32, 48],
    "one more than a page": [17, 33, 49, 1],
}


@pytest.mark.parametrize("kept", KEEPS.values(), ids=KEEPS.keys())
@pytest.mark.parametrize("prompt", [100, 128, 97])
def test_shrink(kept: list[int], prompt: int):
    kept = [min(count, prompt) if count != 100 else prompt for count in kept]
    shape = ModelShape(layers=2, kv_heads=2, query_heads=2, head_dim=1)
    plan = PagePlan(shape, lambda n: [kept[:2], kept[2:]])
    before, after = plan.prefill_blocks(prompt), plan.decode_blocks(prompt, prompt)
    blocks = [11, 3, 8, 20, 5, 9, 14, 2][:before]
    tables = make_tables(heads=4)
    pool = make_pool(tables)
    write(pool, tables.extend(0, row_of(*blocks), 0, prompt, 0, UNBOUNDED), range(prompt))
    generator = torch.Generator().manual_seed(prompt)
    chosen = [sorted(torch.randperm(prompt, generator=generator)[:count].tolist()) for count in kept]
    source, _ = compact_and_shrink(tables, pool, row_of(*blocks), chosen, before, after)

    pages = [ceil_div(count, PAGE) for count in kept]
    moved = sum(j * 4 + head >= sum(pages) for head, count in enumerate(pages) for j in range(count))
    assert len(source) == moved
    alive = blocks[:after] + [0] * (before - after)
    check_integrity(tables, {0: alive})
    expected = [[(p, p, 1000 + p) for p in keep] for keep in chosen]
    assert [read_back(tables, pool, 0, head) for head in range(4)] == expected

    # Decoding: what the shrink left over is used up first, then blocks behind the row's dead entries.
    row = alive + [30, 31, 32, 33]
    for position in range(prompt, prompt + 40):
        entries = plan.row_entries(prompt, position + 1)
        place = append_at(tables, 0, row_of(*row), position)
        assert (place // PAGE // 4).tolist() == [b for b in (place // PAGE // 4).tolist() if b in row[:entries]]
        write(pool, place[None], range(position, position + 1))
        for head in range(4):
            expected[head].append((position, position, 1000 + position))
        check_integrity(tables, {0: row[:entries]})
    assert [read_back(tables, pool, 0, head) for head in range(4)] == expected
    tables.free([0])
    assert all_free(tables)


def test_shrink_releases_chunks():
    """Heads of 70 pages: one keeps both of its chunks, one its first; the other chunk is free again."""
    prompt = 70 * PAGE
    blocks = list(range(1, 71))
    tables = make_tables(heads=2)
    pool = make_pool(tables)
    write(pool, tables.extend(0, row_of(*blocks), 0, prompt, 0, UNBOUNDED), range(prompt))
    assert int(tables._num_free) == tables.sizes.chunks - 4
    compact_and_shrink(tables, pool, row_of(*blocks), [list(range(3, prompt)), [500]], 70, ceil_div(70 + 1, 2))
    assert int(tables._num_free) == tables.sizes.chunks - 3
    check_integrity(tables, {0: blocks[:36] + [0] * 34})
    assert read_back(tables, pool, 0, 1) == [(500, 500, 1500)]
    assert [entry[0] for entry in read_back(tables, pool, 0, 0)] == list(range(3, prompt))


def test_shrink_on_the_less_needy_rank():
    """Blocks follow the neediest tensor-parallel rank: another may be left with more spare pages than heads."""
    shape = ModelShape(layers=1, kv_heads=4, query_heads=4, head_dim=1, tensor_parallel=2)
    prompt = 160
    plan = PagePlan(shape, lambda n: [[n, n, 1, 1]])
    before, after = plan.prefill_blocks(prompt), plan.decode_blocks(prompt, prompt)
    assert (before, after) == (10, 10)
    blocks = list(range(1, 11))
    tables = make_tables(heads=2)
    pool = make_pool(tables)
    write(pool, tables.extend(0, row_of(*blocks), 0, prompt, 0, UNBOUNDED), range(prompt))
    compact_and_shrink(tables, pool, row_of(*blocks), [[7], [9]], before, after)
    row = blocks + list(range(11, 20))
    for position in range(prompt, prompt + 100):
        write(pool, append_at(tables, 0, row_of(*row), position)[None], range(position, position + 1))
        check_integrity(tables, {0: row[: plan.row_entries(prompt, position + 1)]})
    assert read_back(tables, pool, 0, 1)[:2] == [(9, 9, 1009), (160, 160, 1160)]


def test_shrink_refuses_a_plan_that_is_too_small():
    tables = make_tables(heads=2)
    tables.extend(0, row_of(1, 2, 3), 0, 48, 0, UNBOUNDED)
    with pytest.raises(RuntimeError, match="page plan too small"):
        tables.shrink(0, row_of(1, 2, 3), torch.tensor([48, 33]), 3, 2, 48)


# ----------------------------------------------------------------------------------------------- freeing


def test_freed_slots_start_afresh():
    tables, row = make_tables(), row_of(4, 6, 7)
    first = tables.extend(0, row, 0, 40, 0, UNBOUNDED)
    tables.shrink(0, row, torch.tensor([1, 20]), 3, 2, 20)
    tables.extend(3, row_of(9, 10), 0, 20, 0, UNBOUNDED)
    tables.free([0, 3])
    assert all_free(tables) and not tables.lengths.any()
    assert torch.equal(tables.extend(0, row, 0, 40, 0, UNBOUNDED), first)
    check_integrity(tables, {0: [4, 6, 7]})


def test_chunks_for_every_page():
    """The chunk pool suffices when one request lists every page and the others hold one page a head."""
    sizes = TableSizes(slots=2, heads=2, max_tokens=130 * PAGE, blocks=131)
    tables = PageTables(sizes, "cpu")
    tables.extend(0, row_of(*range(1, 130)), 0, 129 * PAGE, 0, UNBOUNDED)
    tables.extend(1, row_of(130), 0, 16, 0, UNBOUNDED)
    check_integrity(tables, {0: range(1, 130), 1: [130]})


def test_sizes_cover_the_tensors():
    """What start-up charges for tables is what they take."""
    sizes = TableSizes(slots=5, heads=6, max_tokens=5000, blocks=64)
    tables = PageTables(sizes, "cpu")
    bytes_taken = sum(t.numel() * t.element_size() for t in vars(tables).values() if isinstance(t, torch.Tensor))
    charged = sizes.fixed_bytes() + sizes.blocks * sizes.bytes_per_block()
    spare = 4 * (CHUNK + PAGE + 3)  # one row of each table, and a counter
    assert bytes_taken <= charged + spare + sizes.blocks  # rounding: less than a byte a block
    assert charged <= 1.1 * bytes_taken


# ------------------------------------------------------------------------------------------ integrity check


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda t: t.chunks[t.directory[1, 0, 0], :1].copy_(t.chunks[t.directory[0, 0, 0], :1]), "foreign block"),
        (lambda t: t.chunks[t.directory[0, 1, 0], :1].copy_(t.chunks[t.directory[0, 0, 0], :1]), "belongs to"),
        (lambda t: t.directory[0, 1].copy_(t.directory[0, 0]), "belongs to|shared chunk"),
        (lambda t: t._num_free.sub_(1), "leaked"),
        (lambda t: t._free_chunks[:1].copy_(t._free_chunks[1:2]), "corrupt"),
        (lambda t: t.lengths[0, 0].zero_(), "empty"),
        (lambda t: t.lengths[2, 0].fill_(1), "dead slot"),
        (lambda t: t.positions.view(-1)[4 * 2 * PAGE : 4 * 2 * PAGE + 2].fill_(3), "twice"),
    ],
)
def test_integrity_check_sees_damage(damage, message: str):
    tables = make_tables()
    tables.extend(0, row_of(4), 0, 10, 0, UNBOUNDED)
    tables.extend(1, row_of(6), 0, 10, 0, UNBOUNDED)
    check_integrity(tables, {0: [4], 1: [6]})
    damage(tables)
    with pytest.raises(AssertionError, match=message):
        check_integrity(tables, {0: [4], 1: [6]})


# -------------------------------------------------------------------------------------------------- pool


def test_pool_is_a_view_of_vllm_layers():
    """Layer l, head h of block b in layout BLHNC is page b * layers * heads + l * heads + h."""
    blocks, layers, heads, dim = 3, 2, 4, 8
    storage = torch.arange(blocks * layers * heads * PAGE * 2 * dim, dtype=torch.float32)
    cache = storage.view(blocks, layers, heads, PAGE, 2 * dim)
    for layer in range(layers):
        pool = PagePool.over(cache[:, layer], layers)
        assert pool.pages.shape == (blocks * layers * heads, PAGE, 2 * dim)
        assert pool.pages.data_ptr() == storage.data_ptr()
        assert torch.equal(pool.pages[2 * layers * heads + layer * heads + 3], cache[2, layer, 3])


@pytest.mark.parametrize(
    "cache",
    [
        torch.zeros(2, 3, 4, 32, 8)[:, 0],
        torch.zeros(3, 2, 4, PAGE, 8)[0],
    ],
    ids=["blocks of 32", "LBHNC"],
)
def test_pool_refuses_other_layouts(cache: torch.Tensor):
    with pytest.raises(RuntimeError, match="BLHNC"):
        PagePool.over(cache, 3)


def test_gather_splits_keys_from_values():
    pages = torch.arange(2 * PAGE * 6).view(2, PAGE, 6)
    key, value = PagePool(pages).gather(torch.tensor([[17], [3]]))
    assert torch.equal(key, torch.stack([pages[1, 1, :3], pages[0, 3, :3]])[:, None])
    assert torch.equal(value, torch.stack([pages[1, 1, 3:], pages[0, 3, 3:]])[:, None])


def test_copy_tokens_reads_before_it_writes():
    pool = PagePool(torch.arange(2 * PAGE * 2).view(2, PAGE, 2).clone())
    before = pool.pages.view(-1, 2).clone()
    source, target = torch.tensor([1, 2, 3, 17]), torch.tensor([0, 1, 2, 3])
    pool.copy_tokens(source, target)
    expected = before.clone()
    expected[:3], expected[3] = before[1:4], before[17]
    assert torch.equal(pool.pages.view(-1, 2), expected)
