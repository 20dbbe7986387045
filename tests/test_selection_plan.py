"""Page plans of requests that select: by hand, and what must hold for any."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvplug.options import RequestOptions
from vllm_kvplug.plan import ceil_div
from vllm_kvplug.policies.registry import make_policy
from vllm_kvplug.policies.selecting import SelectingPolicy
from vllm_kvplug.selection import Layout, SelectionPlan
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
