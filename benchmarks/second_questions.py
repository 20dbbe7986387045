"""A second question about the context of an example of the task file, made from what the context itself says.

Contexts of these kinds say more than the first question asks for, in a form that can be read back: kv (other keys),
multineedle (facts that nobody asked for), vartrack (another value) and html2tsv (another section). An example counts as
read if what was read gives the answer of its first question. The others get no second question: text2json tells its
facts in prose, manyshot_icl does not say what decides a label, and latefact may ask for everything that there is.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Facts = dict[str, str]
"""What one may ask for, and the answer."""


@dataclass(frozen=True)
class Kind:
    """read: facts of a context, given the example's meta. ask: for some of them, in this order."""

    read: Callable[[str, dict[str, Any]], Facts]
    ask: Callable[[Sequence[str], dict[str, Any]], str]


def second_question(example: dict[str, Any], seed: int) -> tuple[str, str] | None:
    """(question, answer) about as many facts as the first question asked for, and others; None if there are none."""
    content, meta = example["prompt_messages"][-1]["content"], example["meta"]
    context, first = content[: -meta["question_chars"]], content[-meta["question_chars"] :]
    kind = KINDS[example["task"]]
    facts = kind.read(context, meta)
    places = {name: re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", first) for name in facts}
    asked = sorted((place.start(), name) for name, place in places.items() if place)
    if not asked or "\n".join(facts[name] for _, name in asked) != example["answer"]:
        return None
    others = [name for name in facts if not places[name]]
    chosen = random.Random(seed).sample(others, min(len(asked), len(others)))
    return (kind.ask(chosen, meta), "\n".join(facts[name] for name in chosen)) if chosen else None


PAIRS = [r'"(.+?)": "(.+?)",', r"The value of (.+?) is (.+?)\.", r"(.+?) -> (.+)", r"(.+?) = (.+)", r"(.+?): (.+)"]


def _pairs(context: str, meta: dict[str, Any]) -> Facts:
    lines = context.strip().splitlines()[1:]
    for form in PAIRS:
        if all(found := [re.fullmatch(form, line) for line in lines]):
            return {pair[1]: pair[2] for pair in found if pair}
    return {}


WHAT = (
    r"[Tt](he (?:access code of|magic number of|password for project|locker code of|badge of|call sign of the ship|"
    r"reference of file|key to the house of) [A-Z]\w*(?: [A-Z]\w*)?|he serial of the \w+ machine|"
    r"he secret word of the \w+ club)(?: is| turned out to be| equals| would be|:) ([\w-]+)\."
)


def _needles(context: str, meta: dict[str, Any]) -> Facts:
    return {"t" + name: value for name, value in re.findall(WHAT, context)}


ASSIGNED = r"VAR (\w+) = (?:VAR )?(\w+)|let (\w+) = (\w+);|Set (\w+) to (?:the value of )?(\w+)\.|(\w+) := (\w+)"


def _chains(context: str, meta: dict[str, Any]) -> Facts:
    """Variables by the value that they hold, where it was passed on at least once."""
    values: dict[str, str] = {}
    for found in re.findall(ASSIGNED, context):
        variable, given = (part for part in found if part)
        values[variable] = values.get(given, given)
    held = {value: [name for name in values if values[name] == value] for value in values.values()}
    return {value: ", ".join(names) for value, names in held.items() if len(names) > 1}


def _sections(context: str, meta: dict[str, Any]) -> Facts:
    """Rows of the sections of a page, in the columns of the first question."""

    def cell(row: str, column: str) -> str:
        found = re.search(rf'class="(?:x-)?{column}(?:-\w\w)?">([^<]*)<', row)
        return found[1] if found else ""

    sections = re.findall(r"<h2>(\w+)</h2>\n(.*?)</section>", context, re.DOTALL)
    rows = {name: body.split(" data-status=")[1:] for name, body in sections}
    return {
        name: "\n".join("\t".join(cell(row, column) for column in meta["columns"]) for row in found)
        for name, found in rows.items()
    }


KINDS = {
    "kv": Kind(
        _pairs, lambda names, meta: f"Give the values of these keys, one per line, in this order: {', '.join(names)}"
    ),
    "multineedle": Kind(
        _needles,
        lambda names, meta: (
            f"From the text above, give the following values, one per line, in this order: {'; '.join(names)}."
        ),
    ),
    "vartrack": Kind(
        _chains,
        lambda names, meta: (
            f"Which variables hold the value {names[0]}, directly or through other variables? List them "
            "in order of assignment, separated by commas."
        ),
    ),
    "html2tsv": Kind(
        _sections,
        lambda names, meta: (
            f'List all rows in the section "{names[0]}" as TSV (tab-separated, no header) with the '
            f"columns {', '.join(meta['columns'])}, in page order."
        ),
    ),
}
