"""The page of a record: all of it in one file, and nothing of a prompt is markup."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
from view_tools import PIECES, made_up

from vllm_kvplug.view.page import render


class Elements(HTMLParser):
    """Names and attributes of a page's elements, and the text in each kind of element."""

    def __init__(self, page: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self._open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._open.append(tag if tag != "script" else f"script {dict(attrs).get('type')}")

    def handle_data(self, data: str) -> None:
        if self._open:
            self.text[self._open[-1]] = self.text.get(self._open[-1], "") + data


@pytest.fixture(scope="module")
def elements() -> Elements:
    return Elements(render(made_up()))


def test_the_data_are_the_records(elements: Elements):
    data = json.loads(elements.text["script application/json"])
    record = made_up()
    assert data["prompt"] == PIECES and data["knobs"] == {"rho": 0.5, "profile": "</script>.json"}
    assert data["kept"] == record.model_dump(mode="json")["kept"]
    assert (data["counts"], data["votes"]) == (record.counts(), record.votes())
    assert (data["tokens"], data["share"], data["triggers"]) == (10, 0.5, 2)


def test_a_prompt_is_never_markup(elements: Elements):
    """One script with data and one with code, whatever tokens say."""
    assert [attrs.get("type") for tag, attrs in elements.found if tag == "script"] == ["application/json", None]
    assert not {"b", "i"} & {tag for tag, _ in elements.found}
    page = render(made_up())
    data = page[page.index('type="application/json">') :].partition(">")[2].partition("</script>")[0]
    assert not set("<>&\u2028") & set(data)
    assert "heterocache on &lt;tiny&gt;" in page


def test_the_script_makes_no_markup():
    page = render(made_up())
    for dangerous in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert dangerous not in page


def test_nothing_is_loaded(elements: Elements):
    for tag, attrs in elements.found:
        assert not {"src", "href", "srcset", "action", "data"} & attrs.keys(), tag
    assert "@import" not in elements.text["style"] and "url(" not in elements.text["style"]
    (policy,) = [attrs["content"] for tag, attrs in elements.found if attrs.get("http-equiv")]
    assert policy is not None and "default-src 'none'" in policy


def test_everything_has_a_name(elements: Elements):
    """Sections are labelled by headings that are there, and the page says its language."""
    names = {attrs["id"] for _, attrs in elements.found if "id" in attrs}
    labels = [attrs["aria-labelledby"] for _, attrs in elements.found if "aria-labelledby" in attrs]
    assert labels and set(labels) <= names
    assert ("html", {"lang": "en"}) in elements.found


def test_the_script_asks_for_elements_that_are_there(elements: Elements):
    names = {attrs["id"] for _, attrs in elements.found if "id" in attrs}
    asked = set(re.findall(r'byId\("([^"]+)"\)', elements.text["script None"]))
    assert asked and asked <= names
