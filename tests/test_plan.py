"""Page plans against counting heads one by one."""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate
from math import ceil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvplug.cuts import Cuts, DecodeCuts, own_tokens
from vllm_kvplug.plan import LayerPlan, PagePlan, SharedPlan, ceil_div
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


# ------------------------------------------------------------------------------------- layers that share


@settings(deadline=None, max_examples=150)
@given(st.sampled_from([1, 2, 4]), st.integers(1, 120), st.integers(0, 60), st.data())
def test_a_layers_heads_fit_however_they_share(tensor_parallel: int, end: int, new: int, data: st.DataObject):
    shape = shape_of(2, 4, tensor_parallel)
    budgets = data.draw(st.lists(st.integers(1, end), min_size=8, max_size=8))
    plan = LayerPlan(shape, lambda n: [budgets[:4], budgets[4:]])
    shared = []
    for layer in (budgets[:4], budgets[4:]):
        heads: list[int] = []
        for rank in range(tensor_parallel):  # a rank's heads share what is theirs
            mine = layer[rank * len(layer) // tensor_parallel : (rank + 1) * len(layer) // tensor_parallel]
            left = sum(mine)
            for behind in range(len(mine) - 1, -1, -1):
                least, most = max(left - behind * end, 0), min(left, end)
                heads.append(data.draw(st.integers(least, most)))
                left -= heads[-1]
        shared.append(heads)
    assert brute_pages(shape, shared, new) <= plan.decode_pages(end, end + new) <= plan.prefill_pages(end + new)
    assert plan.held(end, end) == (plan.prefill_blocks(end), plan.decode_blocks(end, end))
    assert plan.row_entries(end, end + new) <= plan.most_entries(end + new)
    assert plan.decode_blocks(end, end + new) <= plan.peak_blocks(end + new)


def test_what_a_head_of_a_shared_layer_has_for_itself():
    assert own_tokens(0, 400, 4) == 20 and own_tokens(10, 440, 4) == 30 and own_tokens(5, 20, 4) == 5


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


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(SHAPES), st.lists(st.floats(-0.1, 1.2), min_size=1, max_size=16), st.integers(1, 120))
def test_first_blocks_are_the_most_held_so_far(shape: ModelShape, shares: list[float], end: int):
    """Also of a request that is let in with more tokens than are cut at once: a context and what follows it."""
    plan, most = PagePlan(shape, ragged(shape, shares)), end + 100
    held = [plan.prefill_blocks(n) for n in range(1, end + 1)]
    held += [plan.decode_blocks(end, n) for n in range(end + 1, most + 1)]
    assert [plan.first_blocks(end, n) for n in range(1, most + 1)] == list(accumulate(held, max))
    assert plan.first_blocks(end, most) <= plan.peak_blocks(most)
    assert [plan.next_cut(end, n) for n in (0, end - 1, end, most)] == [end, end, None, None]


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


# ------------------------------------------------------------------------------------------ shared budgets

DECODE = DecodeCuts(every=32, budget=24, sinks=2, recent=8)
RATIOS = st.sampled_from([0.001, 0.05, 0.29, 0.5, 0.9, 1.0])


@st.composite
def cuts_of_prompts(draw: st.DrawFn) -> Cuts:
    """Cuts of any prompt, not only what `of_ratio` makes."""
    end = draw(st.integers(1, 200))
    ends = sorted(draw(st.sets(st.integers(0, end), max_size=6)))
    protect = tuple(zip(ends[::2], ends[1::2], strict=False))
    share = draw(st.fractions(0, 1, max_denominator=40))
    every, window = draw(st.sampled_from([16, 17, 24, 32, 100, 400])), draw(st.integers(1, 70))
    return Cuts(end, every, window, share, draw(st.sampled_from([None, DECODE])), protect)


class Simulation:
    """One rank's heads, token by token, bool [heads, tokens]: what a cut may drop is dropped at random."""

    def __init__(self, cuts: Cuts, heads: int, seed: int):
        self.cuts, self.random = cuts, torch.Generator().manual_seed(seed)
        self.stored = torch.ones((heads, 0), dtype=torch.bool)
        self.last = 0

    def grow(self) -> int:
        self.stored = torch.nn.functional.pad(self.stored, (0, 1), value=True)
        return self.stored.shape[1]

    def due(self, n: int) -> bool:
        cuts = self.cuts
        if n <= cuts.prefill_end:
            return n % cuts.every == 0 or n == cuts.prefill_end
        return cuts.decode is not None and n % cuts.decode.every == 0

    def cut(self, n: int) -> None:
        safe = torch.zeros(n, dtype=torch.bool)
        for start, end in self.cuts.protect:
            safe[start:end] = True
        if n <= self.cuts.prefill_end:
            first, end = max(self.last - self.cuts.window, 0), max(n - self.cuts.window, 0)
            safe[:first] = safe[end:] = True
            loose = self.stored & ~safe
            self._drop(loose, int(self.cuts.share * int(loose.sum())))
            self.last = n
            return
        decode = self.cuts.decode
        safe[: decode.sinks] = safe[n - decode.recent :] = True
        budget = max(decode.budget, int(safe.sum())) * len(self.stored)
        self._drop(self.stored & ~safe, budget - int((self.stored & safe).sum()))

    def _drop(self, loose: torch.Tensor, keep: int) -> None:
        """A random order in which some heads come before others, so that shares are as unequal as they can be."""
        rank = torch.rand(loose.shape, generator=self.random)
        rank += torch.randint(0, 3, (len(loose), 1), generator=self.random)
        order = rank.masked_fill(~loose, -1).flatten().argsort(descending=True)
        gone = order[keep : int(loose.sum())]
        self.stored.view(-1)[gone] = False

    @property
    def pages(self) -> int:
        return sum(ceil(int(length) / 16) for length in self.stored.sum(1))


@settings(deadline=None, max_examples=120)
@given(cuts_of_prompts(), st.sampled_from([(1, 1), (2, 3), (5, 4)]), st.integers(0, 150), st.integers(0, 99))
def test_shared_plan_against_simulation(cuts: Cuts, shape: tuple[int, int], answer: int, seed: int):
    heads, end, most = shape[0] * shape[1], cuts.prefill_end, cuts.prefill_end + answer
    plan = SharedPlan(shape_of(*shape), lambda n: cuts)
    request, row, held, due = Simulation(cuts, heads, seed), [], [], []
    for n in range(1, most + 1):
        assert request.grow() == n
        row += [True] * (plan.row_entries(end, n) - len(row))  # as the scheduler does: never shorter
        assert len(row) == plan.row_entries(end, n) <= plan.most_entries(n)
        assert int(request.stored.sum()) == plan.stored_at(end, n)
        assert request.pages <= heads * sum(row) and sum(row) <= ceil(n / 16)
        held.append(sum(row))
        if request.due(n):
            due.append(n)
            request.cut(n)
            before, after = plan.held(end, n)
            assert before == held[-1] >= after == plan.decode_blocks(end, n)
            living = [i for i, lives in enumerate(row) if lives]
            for i in living[after:]:
                row[i] = False
            assert int(request.stored.sum()) == plan.stored(end, n)
        assert request.pages <= heads * sum(row)
    assert plan.cuts(end, 0, most) == due
    assert [plan.first_blocks(end, n) for n in range(1, most + 1)] == list(accumulate(held, max))
    assert plan.prompt_blocks(end) == max(held[:end])
    if answer:
        assert plan.cuts(end, end, most) == [n for n in due if n > end]


@pytest.mark.parametrize("every, decode", [(17, None), (24, None), (100, DECODE), (31, DecodeCuts(20, 24, 2, 8))])
def test_rows_of_cuts_that_are_no_full_pages(every: int, decode: DecodeCuts | None):
    """Rows may grow by two entries for 17 tokens, cut after cut: more than stock's and two."""
    plan = SharedPlan(shape_of(30, 3), lambda n: Cuts.of_ratio(n, every, 1, 0.001, decode))
    entries = [plan.row_entries(end, n) for end in (1, 400, 793, 800) for n in range(1, 801)]
    assert max(entries) <= plan.most_entries(800)
    if every == 17:
        assert max(entries) > 800 // 16 + 2


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([16, 17, 32, 100, 400]), st.integers(1, 100), RATIOS, st.booleans(), st.integers(1, 180))
def test_shared_peak_is_no_less_than_any_request_holds(
    every: int, window: int, ratio: float, decodes: bool, max_len: int
):
    decode = DECODE if decodes else None
    plan = SharedPlan(shape_of(10, 3), lambda n: Cuts.of_ratio(n, every, window, ratio, decode))
    most = max(plan.first_blocks(end, max_len) for end in range(1, max_len + 1))
    assert most <= plan.peak_blocks(max_len) <= min(most + 1, ceil(max_len / 16))


def test_a_request_may_hold_most_when_it_begins_to_decode():
    """640 tokens: a prompt of 512 and 128 more before the first cut are more than a prompt of 640."""
    decode = DecodeCuts(128, 256, 4, 128)
    plan = SharedPlan(shape_of(30, 3), lambda n: Cuts.of_ratio(n, 100, 100, 0.6, decode))
    assert plan.peak_blocks(640) >= plan.first_blocks(512, 640) == 29 > plan.prompt_blocks(640)


@given(st.integers(1, 400), st.sampled_from([16, 100, 1000]), st.integers(1, 500), RATIOS)
def test_cuts_of_ratio(n: int, every: int, window: int, ratio: float):
    cuts = Cuts.of_ratio(n, every, window, ratio)
    budget = Fraction(str(ratio)) * n
    assert 1 <= cuts.window <= max(window, 1) and 0 <= cuts.share <= 1
    kept = cuts.window + cuts.share * (n - cuts.window)
    assert kept == max(budget, 1)  # the window counted in, and at least a token
    assert ratio < 1 or cuts.share == (n > cuts.window)


@pytest.mark.parametrize(
    "n, window, ratio, expected",
    [
        (1, 64, 0.5, (1, Fraction(0))),  # the only token is the window
        (1, 64, 1.0, (1, Fraction(0))),
        (2, 64, 0.5, (1, Fraction(0))),
        (3, 64, 0.5, (1, Fraction(1, 4))),  # 1.5 tokens: one, and a quarter of the other two
        (100, 64, 0.001, (1, Fraction(0))),  # a tenth of a token: one
        (100, 64, 0.5, (50, Fraction(0))),
        (100, 10, 0.29, (10, Fraction(19, 90))),
        (100, 0, 0.5, (1, Fraction(49, 99))),  # no window at all is one token
        (100, 64, 1.0, (64, Fraction(1))),
    ],
)
def test_cuts_of_ratio_by_hand(n: int, window: int, ratio: float, expected: tuple[int, Fraction]):
    cuts = Cuts.of_ratio(n, 2048, window, ratio)
    assert (cuts.window, cuts.share) == expected
    assert cuts.stored(n, 6 * n, 6) == 6 * cuts.window + int(6 * cuts.share * (n - cuts.window))


def test_next_and_previous_cuts():
    cuts = Cuts(250, 100, 10, Fraction(1, 2), DecodeCuts(128, 300, 4, 128))
    assert [cuts.next(n) for n in (0, 99, 100, 249, 250, 255, 256)] == [100, 100, 200, 250, 256, 256, 384]
    assert [cuts.previous(n) for n in (1, 100, 101, 250)] == [0, 0, 100, 200]
    assert Cuts(200, 100, 10, Fraction(1, 2)).next(199) == 200 and Cuts(200, 100, 10, Fraction(1)).next(200) is None
