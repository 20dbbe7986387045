"""Page plans of requests that select: by hand, and what must hold for any."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvplug.cuts import AdmissionCuts, Cuts
from vllm_kvplug.options import RequestOptions
from vllm_kvplug.plan import SharedPlan, ceil_div
from vllm_kvplug.policies.registry import make_policy
from vllm_kvplug.policies.selecting import SelectingPolicy
from vllm_kvplug.selection import AdmittedPlan, Chosen, HostedPlan, Layout, SelectionPlan
from vllm_kvplug.shape import ModelShape

NONE = RequestOptions()
SHAPE = ModelShape(layers=3, kv_heads=4, query_heads=8, head_dim=128, rotary=(1.0,) * 64)


def plan_of(options: RequestOptions = NONE, shape: ModelShape = SHAPE, **knobs: object) -> SelectionPlan:
    policy = make_policy("yakv", knobs, shape).for_request(options)
    assert isinstance(policy, SelectingPolicy)
    plan = policy.plan()
    assert isinstance(plan, SelectionPlan)
    return plan


def test_by_hand() -> None:
    """8,000 tokens: 250 selected and 64 local in 20 pages, landmarks of 7,936 tokens, 240 in a 16-bit page, in 34."""
    plan = plan_of()
    assert plan.layout(8000) == Layout(((7936, 8000),), 250, 7936, 20, 34)
    assert plan.held(8000, 8000) == (500, 54) and plan.kept(8000) == [[314] * 4] * 3
    # 6 places are left in the last page of every head.
    assert [plan.decode_blocks(8000, n) for n in (8006, 8007, 8022, 8023)] == [54, 55, 55, 56]
    assert plan.row_entries(8000, 8007) == 501 and plan.cuts(8000, 0, 9000) == [8000]
    assert plan_of(shape=replace(SHAPE, page_itemsize=4)).layout(8000) == Layout(((7936, 8000),), 250, 7936, 20, 17)
    assert plan_of(shape=replace(SHAPE, tensor_parallel=2)).held(8000, 8000) == (500, 54)


def test_what_stays_and_bounds() -> None:
    protect = RequestOptions(protect=((100, 150), (7990, 9000)))
    layout = plan_of(protect, sinks=4, max_tokens=99).layout(8000)
    assert layout is not None and layout.stays == ((0, 4), (100, 150), (7936, 8000))
    assert (layout.stay, layout.excluded, layout.selected, layout.kept) == (118, 54, 99, 217)
    found = [plan_of(min_tokens=40).layout(n) for n in (64, 100, 150, 2000)]
    assert [one and one.selected for one in found] == [None, None, 40, 62]


def test_a_question_comes_one_token_at_a_time() -> None:
    plan = plan_of(RequestOptions(context_end=2000))
    assert [plan.next_cut(2000, n) for n in (0, 1999, 2000, 2001)] == [2000, 2000, 2001, 2002]
    assert [plan.next_cut(60, n) for n in (0, 60, 61)] == [60, None, None]


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_no_more_blocks_than_the_prompt_itself(data: st.DataObject) -> None:
    knobs = {
        "ratio": data.draw(st.floats(0.001, 1)),
        "min_tokens": data.draw(st.integers(1, 100)),
        "sinks": data.draw(st.integers(0, 40)),
        "local": data.draw(st.integers(1, 100)),
        "landmarks": data.draw(st.sampled_from(["higgs2", "residual"])),
    }
    start = data.draw(st.integers(0, 3000))
    protect = RequestOptions(protect=((start, start + data.draw(st.integers(1, 2000))),))
    plan = plan_of(protect, **knobs)
    end = data.draw(st.integers(1, 6000))
    length = end + data.draw(st.integers(0, 500))
    before, after = plan.held(end, end)
    layout = plan.layout(end)
    assert after <= before == ceil_div(end, 16) and plan.decode_blocks(end, length) <= ceil_div(length, 16)
    assert plan.row_entries(end, length) - (before - after) == plan.decode_blocks(end, length)
    assert plan.row_entries(end, length) <= plan.most_entries(length)
    assert plan.decode_blocks(end, length) <= plan.peak_blocks(length)
    if layout is None:
        assert after == before
        return
    assert after < before and 0 < layout.kept <= 16 * layout.token_blocks
    assert layout.selected <= layout.landmarks - layout.excluded and layout.stays[-1][1] == end
    assert layout.landmarks <= plan.tokens_per_page * layout.landmark_blocks


# ------------------------------------------------------------------------------------------ of a shared budget


def hosted_plan(cuts: Cuts, selected: int, tokens_per_page: int = 240) -> HostedPlan:
    return HostedPlan(SHAPE, lambda n: replace(cuts, prefill_end=n), lambda n: selected, tokens_per_page)


def test_a_shared_budget_by_hand() -> None:
    """8,000 tokens, a cut after each 4,000, a window of 100: of 3,900 and 4,000 tokens a fifth and three tenths."""
    cuts = Cuts(8000, 4000, 100, Fraction(1, 2), floor=Fraction(3, 10))
    plan = hosted_plan(cuts, 250)
    survivors = 1950 + 2000 + 100
    assert cuts.guaranteed() == 1170 + 1200 and cuts.own(4000, 1950 * 12, 12) == 1170
    assert plan.stored(8000, 8000) == 12 * survivors
    # However 12 * 1,930 tokens lie in heads, 122 blocks hold them: 250 of them selected. 2,370 landmarks are in 10.
    layout = plan.layout(8000)
    assert layout == Layout((), 250, 2370, 122, 10) and plan.held(8000, 8000) == (379, 132)
    assert plan.kept_tokens(8000) == 12 * 1930
    assert [plan.decode_blocks(8000, n) for n in (8000, 8008, 8009, 8025)] == [132, 132, 133, 134]
    assert plan.row_entries(8000, 8009) - plan.row_entries(8000, 8000) == 1
    assert plan.cuts(8000, 0, 9000) == [4000, 8000]
    assert [plan.next_cut(8000, n) for n in (0, 4000, 8000, 8001)] == [4000, 8000, 8001, 8002]
    assert hosted_plan(cuts, 2370).layout(8000) is None and hosted_plan(cuts, 250).layout(100) is None
    assert hosted_plan(replace(cuts, floor=Fraction(0)), 250).next_cut(8000, 8000) is None


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_no_more_blocks_than_what_survives(data: st.DataObject) -> None:
    end, every = data.draw(st.integers(1, 6000)), data.draw(st.integers(16, 4000))
    share = Fraction(data.draw(st.integers(0, 100)), 100)
    floor = share * data.draw(st.integers(0, 100)) / 100
    start = data.draw(st.integers(0, 3000))
    protect = ((start, start + data.draw(st.integers(1, 2000))),)
    cuts = Cuts(end, every, data.draw(st.integers(1, 200)), share, floor=floor, protect=protect)
    plan = hosted_plan(cuts, data.draw(st.integers(1, 500)), data.draw(st.integers(8, 400)))
    shared = SharedPlan(SHAPE, plan.cuts_of)
    length = end + data.draw(st.integers(0, 500))
    (before, after), layout = plan.held(end, end), plan.layout(end)
    assert before == shared.held(end, end)[0] and after <= shared.held(end, end)[1]
    assert plan.decode_blocks(end, length) <= shared.decode_blocks(end, length)
    assert plan.row_entries(end, length) <= plan.most_entries(length)
    assert plan.row_entries(end, length) - plan.row_entries(end, end) == plan.decode_blocks(end, length) - after
    assert plan.first_blocks(end, length) <= shared.first_blocks(end, length)
    if layout is None:
        assert after == shared.held(end, end)[1]
        return
    assert after < shared.held(end, end)[1] and 0 < layout.selected <= layout.landmarks
    # Every head has so many tokens that it can give away.
    judged = cuts.judged(end)
    assert layout.landmarks <= judged - sum(t in range(*protect[0]) for t in range(judged))
    assert layout.landmarks <= plan.tokens_per_page * layout.landmark_blocks


# ------------------------------------------------------------------------------------------ behind a gate on admission


def admitted_plan(cap: Fraction, window: int, every: int, chosen: Chosen, protect: object = ()) -> AdmittedPlan:
    def cuts_of(n: int) -> AdmissionCuts:
        return AdmissionCuts(n, every, window, cap, protect=protect, allocation="uniform")

    return AdmittedPlan(SHAPE, cuts_of, chosen, tokens_per_page=240)


def test_admitted_tokens_by_hand() -> None:
    """8,000 tokens, of which 256 are in the window and 44 protected: of 7,700 others each head may admit half."""
    plan = admitted_plan(Fraction(1, 2), 256, 2048, Chosen(0.125, 16, None), protect=((0, 44),))
    # 481 of 3,850 are selected: with 300 that stay, 781 tokens, and 17 pages of landmarks.
    assert plan.layout(8000) == Layout((), 481, 3850, 50, 17, ahead=300)
    assert plan.layout(8000).stay == 300 and plan.layout(8000).excluded == 0
    assert plan.held(8000, 8000)[1] == 67 and plan.kept_tokens(8000) == 12 * 781
    assert [plan.decode_blocks(8000, n) for n in (8001, 8017)] == [67, 68]
    assert plan.layout(256) is None and plan.layout(300) is None
    assert plan.next_cut(8000, 8000) == 8001


@given(st.floats(0.001, 1), st.integers(1, 99), st.none() | st.integers(99, 500), st.lists(st.integers(0, 10**6)))
@settings(deadline=None)
def test_scheduler_and_device_select_equally_many(
    share: float, least: int, most: int | None, tokens: list[int]
) -> None:
    chosen = Chosen(share, least, most)
    found = [chosen.of(n) for n in tokens]
    assert chosen.of_heads(torch.tensor(tokens, dtype=torch.int64)).tolist() == found
    assert all(0 <= one <= n for one, n in zip(found, tokens, strict=True))


def test_a_share_is_taken_as_written() -> None:
    assert [Chosen(share, 1, None).of(100) for share in (0.29, 1 / 3, 0.03125, 0.0001)] == [29, 33, 3, 1]


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_no_more_blocks_than_what_may_be_admitted(data: st.DataObject) -> None:
    end, start = data.draw(st.integers(1, 6000)), data.draw(st.integers(0, 3000))
    protect = ((start, start + data.draw(st.integers(1, 2000))),)
    cap = Fraction(data.draw(st.integers(1, 100)), 100)
    knobs = cap, data.draw(st.integers(1, 300)), data.draw(st.integers(16, 4000))
    plan = admitted_plan(*knobs, Chosen(data.draw(st.floats(0.001, 1)), data.draw(st.integers(1, 99)), None), protect)
    shared, length = SharedPlan(SHAPE, plan.cuts_of), end + data.draw(st.integers(0, 500))
    (before, after), layout = plan.held(end, end), plan.layout(end)
    assert before == shared.held(end, end)[0] and after <= shared.held(end, end)[1]
    assert plan.decode_blocks(end, length) <= shared.decode_blocks(end, length) <= plan.peak_blocks(length)
    assert plan.row_entries(end, length) <= plan.most_entries(length)
    assert plan.row_entries(end, length) - plan.row_entries(end, end) == plan.decode_blocks(end, length) - after
    assert plan.cuts_of(end).guaranteed() <= plan.cuts_of(end + 1).guaranteed()  # and so host slots never fall
    if layout is not None:
        assert layout.kept <= 16 * layout.token_blocks and 0 < layout.selected <= layout.landmarks
        assert layout.stay + layout.landmarks <= end and layout.landmarks <= 240 * layout.landmark_blocks
