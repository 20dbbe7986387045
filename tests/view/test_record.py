"""The numbers of a record, and what is no record."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from view_tools import made_up

from vllm_kvplug.view.record import Record, spans_of


def test_numbers_by_hand():
    record = made_up()
    assert (record.tokens, record.heads, record.triggers) == (10, 6, 2)
    assert record.counts() == [[10, 3], [3, 1], [10, 3]]
    assert record.share() == 0.5
    assert record.votes() == [4, 3, 3, 3, 2, 3, 2, 2, 3, 5]
    assert sum(record.votes()) == sum(map(sum, record.counts()))


@pytest.mark.parametrize(
    "positions, spans",
    [([], ()), ([4], ((4, 5),)), ([0, 1, 2, 5, 7, 8], ((0, 3), (5, 6), (7, 9)))],
)
def test_spans(positions: list[int], spans: tuple[tuple[int, int], ...]):
    assert spans_of(positions) == spans


def test_a_saved_record_is_the_same():
    record = made_up()
    assert Record.model_validate_json(record.model_dump_json()) == record


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"kept": [[[(0, 11)]]], "roles": None}, "not ascending ranges of 10 prompt tokens"),
        ({"kept": [[[(3, 3)]]], "roles": None}, "not ascending"),
        ({"kept": [[[(5, 6), (2, 3)]]], "roles": None}, "not ascending"),
        ({"kept": [[[(-1, 3)]]], "roles": None}, "not ascending"),
        ({"kept": [[[(0, 1)], [(0, 1)]], [[(0, 1)]]], "roles": None}, "same heads"),
        ({"roles": [["pivot", "satellite"]]}, "roles and kept"),
        ({"clusters": []}, "clusters in the record"),
        ({"prompt": []}, "prompt"),
        ({"version": 2}, "version"),
        ({"surprise": 1}, "surprise"),
    ],
    ids=str,
)
def test_what_is_no_record(fields: dict[str, Any], words: str):
    with pytest.raises(ValidationError, match=words):
        made_up(**fields)
