"""What a request may ask for, and what it is told when it asks wrongly."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvplug.options import OptionError, RequestOptions, parse_options

RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)).map(lambda r: (r[0], r[0] + r[1])), max_size=6)


@pytest.mark.parametrize("extra_args", [None, {}, {"kv_transfer_params": {"a": 1}, "kvplugbudget": "x", "off": 1}])
def test_no_options(extra_args: dict[str, Any] | None):
    assert parse_options(extra_args) == RequestOptions(budget=None, protect=(), off=False)


def test_all_options_at_once():
    found = parse_options({"kvplug.protect": [4, 6], "kvplug.budget": 0.25, "kvplug.off": False, "other": 3})
    assert found == RequestOptions(0.25, ((4, 6),), False)


def test_unknown_options_are_named_with_the_known():
    with pytest.raises(OptionError, match="kvplug.budgets: no such option.*kvplug.budget, kvplug.protect, kvplug.off"):
        parse_options({"kvplug.budget": 0.5, "kvplug.budgets": 0.5})


# -------------------------------------------------------------------------------------------------- budget


@pytest.mark.parametrize("value, budget", [(0.5, 0.5), (1, 1.0), ("0.5", 0.5), ("1e-3", 0.001), (1e-9, 1e-9)])
def test_budget(value: Any, budget: float):
    assert parse_options({"kvplug.budget": value}).budget == budget


@pytest.mark.parametrize("value", ["half", "", [0.5], {}, 10**400], ids=lambda v: str(v)[:9])
def test_budget_must_be_a_number(value: Any):
    with pytest.raises(OptionError, match="kvplug.budget must be a number, got"):
        parse_options({"kvplug.budget": value})


@pytest.mark.parametrize("value", [0, 0.0, -0.1, 1.0001, 50, "nan", "inf", float("nan")])
def test_budget_must_be_a_share(value: Any):
    with pytest.raises(OptionError, match="kvplug.budget must be above 0 and at most 1, got"):
        parse_options({"kvplug.budget": value})


# ----------------------------------------------------------------------------------------------------- off


@pytest.mark.parametrize("value", [True, 1, 1.0, "true", "1"])
def test_off(value: Any):
    assert parse_options({"kvplug.off": value}) == RequestOptions(off=True)


@pytest.mark.parametrize("value", [None, False, 0, 0.0, "false", "0"])
def test_not_off(value: Any):
    assert parse_options({"kvplug.off": value, "kvplug.budget": 0.5}) == RequestOptions(0.5)


@pytest.mark.parametrize("value", ["yes", "", 2, -1, [], [1], {}])
def test_off_must_be_a_flag(value: Any):
    with pytest.raises(OptionError, match="kvplug.off must be true or false, got"):
        parse_options({"kvplug.off": value})


def test_off_and_a_budget_contradict():
    with pytest.raises(OptionError, match="kvplug.off keeps everything: remove kvplug.budget"):
        parse_options({"kvplug.off": True, "kvplug.budget": 1})


def test_off_and_protected_ranges_agree():
    found = parse_options({"kvplug.off": True, "kvplug.protect": [0, 3]})
    assert found == RequestOptions(None, ((0, 3),), True)
    assert found.protecting((2, 9)) == RequestOptions(None, ((0, 9),), True)


# --------------------------------------------------------------------------------------------- context_end


@pytest.mark.parametrize("value, tokens", [(None, None), (1, 1), (500, 500), ("500", 500)])
def test_context_end(value: Any, tokens: int | None):
    assert parse_options({"kvplug.context_end": value}).context_end == tokens


@pytest.mark.parametrize("value", [0, -3, "0", 1.5, 2.0, "", "half", True, [5], float("nan")], ids=str)
def test_context_end_must_be_a_number_of_tokens(value: Any):
    with pytest.raises(OptionError, match="kvplug.context_end must be a number of tokens, at least 1, got"):
        parse_options({"kvplug.context_end": value})


def test_what_a_policy_calls_the_prompt():
    assert RequestOptions().prefill_end(90) == 90
    marked = RequestOptions(context_end=50)
    assert [marked.prefill_end(n) for n in (50, 51, 90)] == [50, 50, 50]
    assert marked.protecting((0, 4)).prefill_end(90) == 50, "a protected system prompt changes nothing else"
    assert RequestOptions(off=True, context_end=50).prefill_end(90) == 90, "nothing is dropped, so nothing is cut"


# -------------------------------------------------------------------------------------------------- scores


@pytest.mark.parametrize("value", [None, "0", "00ff", "a" * 64])
def test_scores(value: str | None):
    found = parse_options({"kvplug.scores": value})
    assert found.scores == value and found.given() == ([] if value is None else ["kvplug.scores"])


@pytest.mark.parametrize("value", ["", "../a", "a/b", "A", "g", "a" * 65, "a\n", 5, ["a"]], ids=repr)
def test_scores_are_named_in_hexadecimal(value: Any):
    with pytest.raises(OptionError, match="kvplug.scores must be up to 64 hexadecimal digits, got"):
        parse_options({"kvplug.scores": value})


# ------------------------------------------------------------------------------------------------- protect


@pytest.mark.parametrize(
    "value, ranges",
    [
        (None, ()),
        ([], ()),
        ("[]", ()),
        ([0, 5], ((0, 5),)),
        (["0", "5"], ((0, 5),)),
        ((0, 5, 9, 12), ((0, 5), (9, 12))),
        ([[0, 5], [9, 12]], ((0, 5), (9, 12))),
        ("[0, 5, 9, 12]", ((0, 5), (9, 12))),
        ("[[0, 5], [9, 12]]", ((0, 5), (9, 12))),
        ([9, 12, 0, 5], ((0, 5), (9, 12))),  # ascending
        ([0, 5, 3, 8], ((0, 8),)),  # disjoint
        ([0, 9, 3, 5, 11, 12], ((0, 9), (11, 12))),  # one inside another
        ([0, 5, 5, 8], ((0, 8),)),
        ([0, 5, 0, 5], ((0, 5),)),
    ],
    ids=str,
)
def test_protect(value: Any, ranges: tuple[tuple[int, int], ...]):
    assert parse_options({"kvplug.protect": value}).protect == ranges


@pytest.mark.parametrize(
    "value",
    [5, "5", "0-5", "", "[0, 5", '"05"', '{"0": 1, "5": 2}', {0: 1}, [0, 1.5], "[0, 1.0]", "[0, Infinity]", "[0, NaN]"]
    + [[0], [0, 5, 9], [[0, 5], 9, 12], [0, 5, [9, 12]], [[0, 5, 3], [8]], [[0]], [[[0, 5]]], [0, None], [False, True]]
    + [[[0, 5], "12"], "[" * 100_000],
    ids=lambda v: str(v)[:20],
)
def test_protect_must_be_token_ranges(value: Any):
    with pytest.raises(OptionError, match="kvplug.protect must be token ranges"):
        parse_options({"kvplug.protect": value})


@pytest.mark.parametrize("value", [[-1, 5], [5, 5], [7, 5], [0, 5, 9, 9], [[0, 5], [3, -1]]], ids=str)
def test_protected_ranges_hold_tokens(value: Any):
    with pytest.raises(OptionError, match="kvplug.protect must be .* each needs 0 <= start < end"):
        parse_options({"kvplug.protect": value})


def test_protected_ranges_are_few():
    """As they are once merged."""
    apart = [[10 * i, 10 * i + 5] for i in range(65)]
    assert len(parse_options({"kvplug.protect": apart[1:]}).protect) == 64
    with pytest.raises(OptionError, match="kvplug.protect takes up to 64 ranges, got 65"):
        parse_options({"kvplug.protect": apart})
    assert len(parse_options({"kvplug.protect": [*apart, [4, 11]]}).protect) == 64


@settings(deadline=None)
@given(RANGES, RANGES, st.integers(0, 60))
def test_protected_tokens_are_those_in_any_range(given: list, more: list, tokens: int):
    options = parse_options({"kvplug.protect": given, "kvplug.budget": 0.5})
    both = options.protecting(*more)
    assert (both.budget, both.off) == (0.5, False)
    for found, ranges in ((options, given), (both, given + more)):
        inside = {t for start, end in ranges for t in range(start, end)}
        assert {t for start, end in found.protect for t in range(start, end)} == inside
        assert found.protected(tokens) == len([t for t in inside if t < tokens])
        borders = [border for start, end in found.protect for border in (start, end)]
        assert borders == sorted(set(borders)), "ranges must be ascending and apart"
