"""Tasks whose answers lie all over a long context. Every example is made from a seed; there is no data set."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from dataclasses import dataclass

from vllm_kvplug.errors import PolicyError
from vllm_kvplug.eval import scoring

Count = Callable[[str], int]
"""Tokens of a text."""

OVERHEAD = 48
"""Tokens that chat templates add, a default system message among them."""

SHARED = 4
"""Questions that `multiquery` asks about one context."""

NOUNS = "bridge garden lantern engine orchard harbour letter window mountain river clock basket ladder museum".split()
TRAITS = "quiet narrow heavy bright wooden distant hollow gentle stubborn ancient crooked humid silver plain".split()
VERBS = "watched repaired crossed described ignored painted measured followed restored admired guarded sketched".split()
JOBS = "baker pilot tailor surveyor chemist florist plumber notary welder optician botanist carpenter".split()
COLOURS = "amber azure black coral crimson ivory jade olive orange pearl teal violet white".split()

RELATIONS = [
    (("only {v} opens the gate of {x}", "nobody enters {x} without typing {v}"), "entry code"),
    (("letters to {x} must carry {v}", "the post office knows {x} as {v}"), "postal reference"),
    (("{x} pays its bills from {v}", "invoices of {x} are charged to {v}"), "billing account"),
    (("on the radio {x} answers to {v}", "pilots call {x} by saying {v}"), "call sign"),
]
"""How a text says what a question asks for in other words."""


@dataclass(frozen=True)
class Example:
    """One question about one context, which stands before it in the message of a user."""

    task: str
    context: str
    question: str
    answer: str

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.context + "\n\n" + self.question}]

    @property
    def context_end(self) -> int:
        """Characters of the message that any other question about this context would share."""
        return len(self.context)

    def score(self, output: str) -> float:
        """How right an output is, in [0, 1]."""
        return SCORERS.get(self.task, scoring.lines_in_place)(output, self.answer)


@dataclass(frozen=True)
class Draft:
    """An example before its context is filled up: `facts` keep their order among what `filler` makes."""

    facts: list[str]
    filler: Callable[[], str]
    question: str
    answer: str
    head: str = ""
    tail: str = ""


def make(task: str, tokens: int, seed: int, index: int, count: Count) -> Example:
    """Example number `index`: prompt and answer together have about `tokens` tokens, and not more.

    Raises PolicyError for an unknown task, or one that does not fit.
    """
    if task not in TASKS:
        raise PolicyError(f"--tasks {task}: no such task. There are {', '.join(TASKS)}.")
    group = index // SHARED if task == "multiquery" else index
    rng = Random(f"{task} {tokens} {seed} {group}")
    rng.part = index % SHARED
    draft = TASKS[task](rng, max(tokens // 256, 1))
    fixed = [draft.head, *draft.facts, draft.tail, draft.question, draft.answer]
    room = tokens - OVERHEAD - sum(count(text) + 1 for text in fixed)
    if room < 0:
        raise PolicyError(f"--tokens {tokens} is too short for task {task}, which needs {tokens - room}")
    pieces = []
    while (cost := count(piece := draft.filler()) + 1) <= room:
        pieces.append(piece)
        room -= cost
    places = sorted(rng.randint(0, len(pieces)) for _ in draft.facts)
    for place, fact in reversed(list(zip(places, draft.facts, strict=True))):
        pieces.insert(place, fact)
    context = "\n".join(part for part in (draft.head, *pieces, draft.tail) if part)
    return Example(task, context, draft.question, draft.answer)


# ------------------------------------------------------------------------------------------ words


class Random(random.Random):
    """Random words, none of them twice."""

    part = 0

    def __init__(self, seed: str):
        super().__init__(seed)
        self._used: set[str] = set()

    def new(self, make: Callable[[], str]) -> str:
        while (word := make()) in self._used:
            pass
        self._used.add(word)
        return word

    def word(self) -> str:
        return self.new(lambda: "".join(self.choice("bdfgklmnprstvz") + self.choice("aeiou") for _ in range(3)))

    def name(self) -> str:
        return self.word().capitalize()

    def alike(self, name: str) -> str:
        """A name that differs from another in its last letter."""
        return self.new(lambda: name.lower()[:-1] + self.choice("aeiou")).capitalize()

    def code(self) -> str:
        symbols = string.ascii_lowercase + string.digits
        return self.new(lambda: "".join(self.choices(symbols, k=3)) + "-" + str(self.randint(100, 999)))

    def number(self) -> str:
        return self.new(lambda: str(self.randint(10_000, 999_999)))

    def thing(self) -> str:
        return f"the {self.choice(TRAITS)} {self.choice(NOUNS)}"

    def sentence(self) -> str:
        return f"{self.thing()} {self.choice(VERBS)} {self.thing()} near {self.thing()}.".capitalize()


# ------------------------------------------------------------------------------------------ tasks


def multineedle(rng: Random, size: int) -> Draft:
    """Codes of several places in unrelated prose."""
    pairs = [(rng.name(), rng.code()) for _ in range(min(2 + size, 8))]
    asked = rng.sample(pairs, len(pairs))
    return Draft(
        [f"The door code of {name} is {code}." for name, code in pairs],
        rng.sentence,
        f"Give the door codes of {_listed(asked)}: one per line, in this order, and nothing else.",
        _second(asked),
    )


def hardneedle(rng: Random, size: int) -> Draft:
    """Facts told in other words than they are asked for, among others of the same place, of one whose name looks alike,
    and of the past.
    """

    def told(name: str, relation: int, value: str, when: str = "") -> str:
        text = when + rng.choice(RELATIONS[relation][0]).format(x=name, v=value)
        return text[0].upper() + text[1:] + "."

    facts, asked = [], []
    for _ in range(min(1 + size, 6)):
        name, value, relation = rng.name(), rng.code(), rng.randrange(len(RELATIONS))
        alike = rng.alike(name)
        other = (relation + rng.randrange(1, len(RELATIONS))) % len(RELATIONS)
        facts += [told(name, relation, value), told(name, other, rng.code()), told(alike, relation, rng.code())]
        facts.append(told(name, relation, rng.code(), "until last spring, "))
        asked.append((f"the {RELATIONS[relation][1]} of {name}", value))
    rng.shuffle(facts)
    return Draft(
        facts,
        rng.sentence,
        f"As of today, give {_listed(asked)}: one per line, in this order, and nothing else.",
        _second(asked),
    )


def kv(rng: Random, size: int) -> Draft:
    """Values of several keys among many pairs."""
    pairs = [(rng.word(), rng.code()) for _ in range(min(1 + size, 8))]
    asked = rng.sample(pairs, len(pairs))
    return Draft(
        [f"{key}: {value}" for key, value in pairs],
        lambda: f"{rng.word()}: {rng.code()}",
        f"Give the values of {_listed(asked)}: one per line, in this order, and nothing else.",
        _second(asked),
        head="Keys and their values.",
    )


def text2json(rng: Random, size: int) -> Draft:
    """Attributes of some people, told in prose, as JSON."""
    people = [_person(rng) for _ in range(min(1 + size, 6))]
    asked = rng.sample(people, len(people))
    keys = rng.sample(["age", "job", "city", "phone"], 3)
    chosen = [{"name": p["name"], **{key: p[key] for key in keys}} for p in asked]
    return Draft(
        [_told(p) for p in people],
        lambda: _told(_person(rng)),
        f"Describe {', '.join(p['name'] for p in asked)} as a JSON list of objects with the keys name, "
        f"{', '.join(keys)}; all values are strings. Answer with JSON only.",
        json.dumps(chosen),
    )


def html2tsv(rng: Random, size: int) -> Draft:
    """Rows of a page that have a certain state, as tab-separated lines."""
    states = rng.sample(COLOURS, 4)

    def item(state: str) -> tuple[str, str]:
        row = (rng.name(), str(rng.randint(10, 999)), rng.code())
        cells = "".join(f"<td>{cell}</td>" for cell in row)
        return f'<tr data-state="{state}">{cells}</tr>', "\t".join(row)

    rows = [item(states[0]) for _ in range(min(2 + size, 10))]
    return Draft(
        [html for html, _ in rows],
        lambda: item(rng.choice(states[1:]))[0],
        f'List the rows with data-state "{states[0]}" as tab-separated lines without a header, and nothing else.',
        "\n".join(line for _, line in rows),
        head="<html><body><table>\n<tr><th>name</th><th>stock</th><th>code</th></tr>",
        tail="</table></body></html>",
    )


def vartrack(rng: Random, size: int) -> Draft:
    """Variables that hold a value, most of them through others."""
    value, chain = rng.number(), [rng.word() for _ in range(min(2 + size, 6))]
    facts = [f"SET {chain[0]} = {value}"] + [f"SET {b} = {a}" for a, b in zip(chain, chain[1:], strict=False)]
    return Draft(
        facts,
        lambda: f"SET {rng.word()} = {rng.number()}" if rng.random() < 0.3 else rng.sentence(),
        f"Which variables hold the value {value}, directly or through another variable? Answer with their names only, "
        "separated by commas.",
        ", ".join(chain),
    )


def manyshot(rng: Random, size: int) -> Draft:
    """A made-up classification, learnt from examples: a nonsense word in each text decides."""
    labels = [rng.name() for _ in range(min(3 + size, 8))]
    triggers = {rng.word(): label for label in labels for _ in range(2)}

    def text(trigger: str) -> str:
        return rng.sentence().replace(" near", f" and the {trigger} near")

    def shown(trigger: str) -> str:
        return f"{text(trigger)} => {triggers[trigger]}"

    asked = rng.sample(list(triggers), 3)
    return Draft(
        [shown(trigger) for trigger in triggers],
        lambda: shown(rng.choice(list(triggers))),
        "Classify these texts in the same way: one label per line, and nothing else.\n" + "\n".join(map(text, asked)),
        "\n".join(triggers[trigger] for trigger in asked),
        head="Texts and their labels.",
    )


def drift(rng: Random, size: int) -> Draft:
    """An answer that begins with one part of the context and goes on with others: attention has to move."""
    count = min(2 + size, 8)
    register = [(rng.name(), rng.code()) for _ in range(count)]
    rooms = [(rng.name(), rng.code()) for _ in range(count)]
    first, then = rng.sample(register, count), rng.sample(rooms, count)
    return Draft(
        [f"The storage room {name} opens with {code}." for name, code in rooms],
        rng.sentence,
        f"First give the register entries of {_listed(first)}; then what opens the storage rooms {_listed(then)}. "
        "One code per line, in this order, and nothing else.",
        _second(first + then),
        head="Register\n" + "\n".join(f"{name}: {code}" for name, code in register),
    )


def multiquery(rng: Random, size: int) -> Draft:
    """Several questions about one context: what is kept for one must serve the others too."""
    people = [_person(rng) for _ in range(SHARED)]
    keys = rng.sample(["age", "job", "city", "phone"], 4)
    person, key = people[rng.part], keys[rng.part]
    return Draft(
        [_told(p) for p in people],
        lambda: _told(_person(rng)),
        f"What is the {key} of {person['name']}? Answer with that and nothing else.",
        person[key],
    )


def _person(rng: Random) -> dict[str, str]:
    age, job = str(rng.randint(20, 90)), rng.choice(JOBS)
    return {"name": rng.name(), "age": age, "job": job, "city": rng.name(), "phone": rng.number()}


def _told(p: dict[str, str]) -> str:
    return f"{p['name']}, age {p['age']}, works as a {p['job']} in the city of {p['city']}; the phone is {p['phone']}."


def _listed(pairs: list[tuple[str, str]]) -> str:
    return ", ".join(first for first, _ in pairs)


def _second(pairs: list[tuple[str, str]]) -> str:
    return "\n".join(second for _, second in pairs)


TASKS: dict[str, Callable[[Random, int], Draft]] = {
    task.__name__: task
    for task in (text2json, multineedle, hardneedle, html2tsv, kv, vartrack, manyshot, drift, multiquery)
}
SCORERS = {"text2json": scoring.json_values, "html2tsv": scoring.lines_in_any_order, "vartrack": scoring.names}
