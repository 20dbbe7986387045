"""Page plans against counting heads one by one."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvplug.plan import PagePlan, ceil_div
from vllm_kvplug.shape import ModelShape


def shape_of(layers: int = 2, kv_heads: int = 4, tensor_parallel: int = 1) -> ModelShape:
    return ModelShape(layers, kv_heads, 2 * kv_heads, 64, tensor_parallel)


def ragged(shape: ModelShape, shares: list[float]):
    """kept(n) with a share of the prompt per head, in turn; at least one token."""

    def kept(n: int) -> list[list[int]]:
        counts = iter([min(max(int(shares[i % len(shares)] * n), 1), n) for i in range(shape.heads)])
        return [[next(counts) for _ in range(shape.kv_heads)] for _ in range(shape.layers)]

    return kept


def brute_pages(shape: ModelShape, kept: list[list[int]], new: int) -> int:
    """Pages of the neediest rank: every head holds what it kept and `new` tokens more."""
    ranks = [0] * shape.tensor_parallel
    for rank in range(shape.tensor_parallel):
        for layer in kept:
            for head in range(shape.kv_heads):
                if shape.tensor_parallel <= shape.kv_heads:
                    mine = head // (shape.kv_heads // shape.tensor_parallel) == rank
                else:  # a head is replicated on tp / kv_heads neighbouring ranks
                    mine = rank // (shape.tensor_parallel // shape.kv_heads) == head
                ranks[rank] += ceil((layer[head] + new) / 16) if mine else 0
    return max(ranks)


# ------------------------------------------------------------------------------------------------- dense


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 31, 32, 33, 1023, 1024, 1025, 131072])
@pytest.mark.parametrize("tensor_parallel", [1, 2, 4, 8])
def test_dense_is_what_stock_vllm_takes(n: int, tensor_parallel: int):
    plan = PagePlan(shape_of(3, 4, tensor_parallel), None)
    assert plan.prefill_blocks(n) == ceil(n / 16)
    assert not plan.shrinks
    for end in {1, n // 2 or 1, n}:
        assert plan.decode_blocks(end, n) == ceil(n / 16)
        assert plan.row_entries(end, n) == ceil(n / 16)
    assert plan.peak_blocks(n) == ceil(n / 16)
    assert plan.kept(n) == [[n] * 4] * 3


def test_keeping_everything_is_dense():
    shape = shape_of()
    plan = PagePlan(shape, lambda n: [[n] * shape.kv_heads] * shape.layers)
    for end in range(1, 70):
        for n in range(end, 90):
            assert plan.decode_blocks(end, n) == plan.row_entries(end, n) == ceil(n / 16)


# ------------------------------------------------------------------------------------------------ shrinking

SHAPES = [shape_of(2, 4), shape_of(1, 1), shape_of(3, 2, 2), shape_of(2, 4, 4), shape_of(2, 2, 4), shape_of(2, 8, 2)]


@settings(deadline=None, max_examples=80)
@given(
    st.sampled_from(SHAPES),
    st.lists(st.floats(-0.1, 1.2), min_size=1, max_size=16),
    st.integers(1, 300),
    st.integers(0, 300),
)
def test_decode_pages(shape: ModelShape, shares: list[float], end: int, new: int):
    kept = ragged(shape, shares)
    plan = PagePlan(shape, kept)
    pages = brute_pages(shape, kept(end), new)
    assert plan.decode_pages(end, end + new) == pages
    heads = shape.layers * max(shape.kv_heads // shape.tensor_parallel, 1)
    assert plan.heads_per_rank == heads
    assert plan.decode_blocks(end, end + new) == ceil(pages / heads)
    assert plan.prefill_blocks(end) == ceil(end / 16)
    assert plan.kept(end) == kept(end)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(SHAPES), st.lists(st.floats(-0.1, 1.2), min_size=1, max_size=16), st.integers(1, 120))
def test_rows_only_grow_and_fit_the_block_table(shape: ModelShape, shares: list[float], end: int):
    plan, most = PagePlan(shape, ragged(shape, shares)), end + 100
    entries = [plan.row_entries(end, n) for n in range(1, most + 1)]
    assert entries == sorted(entries)
    for n, count in enumerate(entries, 1):
        assert count <= ceil(n / 16) + 1
    # While the prompt is computed nothing is given back yet; after it, blocks and dead entries make the row.
    assert entries[:end] == [ceil(n / 16) for n in range(1, end + 1)]
    dead = plan.prefill_blocks(end) - plan.decode_blocks(end, end)
    assert dead >= 0
    assert entries[end:] == [dead + plan.decode_blocks(end, n) for n in range(end + 1, most + 1)]


def test_a_row_may_need_one_entry_more_than_stock():
    """The bound that the spec gives vLLM's block table is reached."""
    plan = PagePlan(shape_of(1, 1), lambda n: [[min(n, 16)]])
    assert plan.row_entries(17, 18) == 3 == ceil(18 / 16) + 1


def test_rows_of_every_prompt_length():
    shape = shape_of(1, 2)
    for kept_tokens in (1, 15, 16, 17, 40):
        plan = PagePlan(shape, lambda n, k=kept_tokens: [[min(n, k), n]])
        for end in range(1, 80):
            for n in range(1, 120):
                assert plan.row_entries(end, n) <= ceil(120 / 16) + 1


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(SHAPES), st.lists(st.floats(-0.1, 1.2), min_size=1, max_size=16), st.integers(1, 90))
def test_peak_is_the_most_a_request_holds(shape: ModelShape, shares: list[float], max_len: int):
    plan = PagePlan(shape, ragged(shape, shares))
    held = [plan.prefill_blocks(n) for n in range(1, max_len + 1)]
    held += [plan.decode_blocks(end, n) for end in range(1, max_len + 1) for n in range(end, max_len + 1)]
    assert plan.peak_blocks(max_len) == max(held)


# ------------------------------------------------------------------------------------------ tensor parallel


def test_blocks_follow_the_neediest_rank():
    kept = [[64, 64, 1, 1], [64, 64, 1, 1]]
    for ranks, pages in ((1, 2 * (4 + 4 + 1 + 1)), (2, 2 * (4 + 4)), (4, 2 * 4), (8, 2 * 4)):
        plan = PagePlan(shape_of(2, 4, ranks), lambda n: kept)
        assert plan.decode_pages(64, 64) == pages
        assert plan.decode_blocks(64, 64) == ceil(pages / plan.heads_per_rank)


def test_the_neediest_rank_may_change_while_decoding():
    plan = PagePlan(shape_of(1, 4, 2), lambda n: [[48, 1, 16, 16]])
    assert plan.decode_pages(48, 48) == 3 + 1
    assert plan.decode_pages(48, 49) == max(4 + 1, 2 + 2)
    plan = PagePlan(shape_of(1, 4, 2), lambda n: [[31, 1, 16, 16]])
    assert plan.decode_pages(48, 48) == 3
    assert plan.decode_pages(48, 49) == 4  # the other rank's


@pytest.mark.parametrize("kv_heads, ranks", [(8, 1), (8, 2), (8, 8), (2, 4), (1, 8), (4, 4)])
def test_ranks_hold_every_head(kv_heads: int, ranks: int):
    shape = shape_of(1, kv_heads, ranks)
    held = [head for rank in range(ranks) for head in shape.rank_heads(rank)]
    copies = max(ranks // kv_heads, 1)
    assert held == [head for head in range(kv_heads) for _ in range(copies)]
    assert {len(shape.rank_heads(rank)) for rank in range(ranks)} == {shape.rank_kv_heads}


# --------------------------------------------------------------------------------------------------- ring


@pytest.mark.parametrize("ring", [1, 15, 16, 17, 100])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ring_bounds_prompt_and_answer_alike(ring: int, shape: ModelShape):
    plan = PagePlan(shape, None, ring)
    for n in range(1, 200):
        blocks = ceil(min(n, ring) / 16)
        assert plan.prefill_blocks(n) == blocks
        assert plan.prefill_pages(n) == blocks * plan.heads_per_rank
        for end in {1, n // 2 or 1, n}:
            assert plan.decode_blocks(end, n) == plan.row_entries(end, n) == blocks
        assert plan.kept(n) == [[min(n, ring)] * shape.kv_heads] * shape.layers
    assert plan.peak_blocks(200) == ceil(ring / 16)


@pytest.mark.parametrize("a, b, result", [(0, 16, 0), (1, 16, 1), (16, 16, 1), (17, 16, 2), (-1, 16, 0)])
def test_ceil_div(a: int, b: int, result: int):
    assert ceil_div(a, b) == result
