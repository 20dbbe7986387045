"""What a policy does to a second turn of a chat, and to a long open generation.

    python -m benchmarks.second_turn MODEL --tasks tasks.py --work DIR --out FILE --run NAME=POLICY:JSON ...
        [--tokens 4096] [--examples 16] [--texts 16] [--decoded 1000] [--one-cache] [--at-once N] [--seconds S]

Second turn: an example's prompt, full attention's own answer, and a second question about the same context
(benchmarks/second_questions.py says of which tasks, and why not of the others). second_turn.RUN.rel is the score of the
second answers relative to full attention's, with a paired bootstrap interval (rel_low, rel_high); .agreement is their
score if full attention's second answer is taken for the right one, which says something of models that are not good at
second questions too. The chat is computed as one prompt, as by a server without prefix caching. With --one-cache
prompts are cut where the first answer begins, as if the cache were kept from turn to turn; metrics are then those of
second_turn_one_cache.

Open generation: full attention goes on greedily with texts of --tokens tokens, and every policy is made to say the
same tokens while it decodes (benchmarks/forced.py), with the memory that it would have. open1000.RUN.kld is the mean KL
divergence of its next-token distributions from full attention's, in nats, a lower bound (vllm_kvplug/eval/fidelity.py);
.token_match the share of steps in which its most likely token is full attention's. open1000.full is what two runs of
full attention differ by.

Texts are documentation that installed packages carry. DIR keeps what full attention said, so that the same command goes
on where it stopped and more runs can be added to a file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from os.path import commonprefix
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.engine import Turns, apart, engine, side_by_side
from benchmarks.eval_tasks import Examination, Held, lanes_of, load_tasks, load_tokenizer, policy_counts, read_runs
from benchmarks.fidelity import continuations, prompts
from benchmarks.forced import ENGINE, follow, speak
from benchmarks.lanes import FULL, Found, Row, measure
from benchmarks.second_questions import KINDS, second_question
from vllm_kvplug import compat
from vllm_kvplug.eval.fidelity import Continuation, divergence
from vllm_kvplug.eval.prompts import WITHOUT_CONTEXT_END, chat_ids
from vllm_kvplug.eval.report import Results

MOST_TRIED = 20
"""Examples of a task that are looked at for each that allows a second question."""

Example = dict[str, Any]


@dataclass(frozen=True)
class Followed(Found):
    """As Found, of second answers. agreement: with full attention's. kld, token_match: of the open generation."""

    agreement: float
    kld: float
    token_match: float


@dataclass(frozen=True)
class SecondTurn(Examination):
    """An examination by second questions. one_cache: prompts are cut where the first answer begins.

    texts, decoded: prompts of the open generation, and its tokens. work: of what full attention said to all of them.
    """

    texts: int = 0
    decoded: int = 0
    one_cache: bool = False
    work: Path = Path()

    @property
    def key(self) -> str:
        return "second_turn_one_cache" if self.one_cache else "second_turn"

    @cached_property
    def task_list(self) -> list[str]:
        return [task for task in self.only or load_tasks(self.tasks).TASKS if task in KINDS]

    @property
    def about(self) -> Row:
        said = [self._said["answers"], self._said["seconds"], [one.tokens for one in self.opened]]
        digest = hashlib.sha256(json.dumps(said).encode()).hexdigest()
        return {**super().about, "texts": self.texts, "decoded": self.decoded, "full_said": digest}

    @property
    def arguments(self) -> dict[str, Any]:
        longest = max(2 * self.tokens, self.tokens + self.decoded)
        return {**super().arguments, "max_model_len": longest, **ENGINE}

    @cached_property
    def firsts(self) -> list[Example]:
        """`examples` of every task."""
        given = self.tasks, self.model, self.tokens, self.examples, self.seed
        jobs = [partial(examples_of, task, *given) for task in self.task_list]
        made = [outcome for _, outcome in sorted(side_by_side(jobs, os.cpu_count() or 1), key=lambda pair: pair[0])]
        if errors := [outcome.error for outcome in made if outcome.error]:
            raise SystemExit(errors[0])
        return [example for outcome in made for example in outcome.value or ()]

    @cached_property
    def opening(self) -> list[list[int]]:
        return prompts(load_tokenizer(self.model), self.tokens, self.texts)

    @cached_property
    def _said(self) -> dict[str, Any]:
        """By full attention, now or in an earlier call."""
        digest = hashlib.sha256(json.dumps([[e["ids"] for e in self.firsts], self.opening]).encode()).hexdigest()
        about = {"model": Path(self.model).name, "dtype": self.dtype, "decoded": self.decoded, "prompts": digest}
        results = Results(self.work, about)
        if FULL not in results.runs:
            results.add(FULL, apart(partial(_full_says, self)))
        return results.runs[FULL]

    @cached_property
    def opened(self) -> list[Continuation]:
        return continuations(self._said["continuations"])

    @cached_property
    def asked(self) -> list[Example]:
        """Chats whose first answers are full attention's."""
        return self.chats(self._said["answers"])

    def chats(self, answers: Sequence[str]) -> list[Example]:
        """Of given answers to first questions; their second questions at the end, with limits on the answers."""
        tokenizer, made = load_tokenizer(self.model), list[Example]()
        for example, answer in zip(self.firsts, answers, strict=True):
            question, wanted = example["second"]
            turns = [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
            ids = chat_ids(tokenizer, [*example["prompt_messages"], *turns])
            chat = {"ids": ids, "first": len(commonprefix([ids, example["ids"]]))}
            made.append({**example, **chat, "answer": wanted, "max_tokens": example["second_max_tokens"]})
        return made

    def options(self, policy: str | None) -> list[dict[str, Any]]:
        cut = self.one_cache and policy is not None and policy not in WITHOUT_CONTEXT_END
        return [{"kvplug.context_end": example["first"]} if cut else {} for example in self.asked]

    def run(self, policy: str | None, knobs: dict[str, Any], turns: Turns) -> Followed:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        given = {"kv_policy": policy, "kv_policy_config": knobs} if policy else {}
        tasks, asked, options = load_tasks(self.tasks), self.asked, self.options(policy)
        with turns.together(), engine(**self.arguments, **given) as llm:
            held, chats = Held(llm, policy), [example["ids"] for example in asked]
            answers = compat.generate(llm, chats, limits(asked), lambda _: held.look(), options)
            counted = policy_counts(llm) if policy else {}
            said = follow(llm, self.opening, [one.tokens for one in self.opened])

        def score(wanted: list[str]) -> list[float]:
            given = zip(asked, answers, wanted, strict=True)
            return [tasks.score(e["task"], e["meta"], answer.text, right) for e, answer, right in given]

        measured = {"agreement": fmean(score(self._said["seconds"])), **along(said, self.opened), **held.found}
        prompt = fmean(len(example["ids"]) for example in asked)
        return Followed(score([e["answer"] for e in asked]), prompt, **measured, tpot_ms=None, counted=counted)


def examples_of(task: str, path: Path, model: str, tokens: int, count: int, seed: int) -> list[Example]:
    """The first `count` examples of a task that allow a second question: `second`, with its answer."""
    tasks, tokenizer, found = load_tasks(path), load_tokenizer(model), list[Example]()
    counter = tasks.counter(model)
    for i in range(MOST_TRIED * count):
        example = tasks.make(task, tokens, seed, i, "eval", counter)
        if second := second_question(example, i):
            most = [int(len(tokenizer(answer)["input_ids"]) * 1.25) + 16 for answer in (example["answer"], second[1])]
            given = {"second": second, "max_tokens": most[0], "second_max_tokens": most[1]}
            found.append({**example, **given, "ids": chat_ids(tokenizer, example["prompt_messages"])})
        if len(found) == count:
            return found
    raise ValueError(f"{path}: of {MOST_TRIED * count} examples of {task} only {len(found)} allow a second question")


def _full_says(examination: SecondTurn) -> dict[str, Any]:
    """Full attention's answers to first and second questions, and its continuations of texts."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    firsts = examination.firsts
    with engine(**examination.arguments) as llm:
        answers = [one.text for one in compat.generate(llm, [e["ids"] for e in firsts], limits(firsts))]
        chats = examination.chats(answers)
        seconds = [one.text for one in compat.generate(llm, [e["ids"] for e in chats], limits(chats))]
        opened = speak(llm, examination.opening, examination.decoded)
    return {"answers": answers, "seconds": seconds, "continuations": [[one.tokens, one.steps] for one in opened]}


def limits(asked: Sequence[Example]) -> list[int]:
    return [example["max_tokens"] for example in asked]


def along(ours: Sequence[Continuation], full: Sequence[Continuation]) -> dict[str, float]:
    """Of two that have said the same tokens: mean KL divergence, and how often the most likely token is the same."""
    assert [one.tokens for one in ours] == [one.tokens for one in full], "an engine has not said what it had to"
    pairs = [steps for a, b in zip(full, ours, strict=True) for steps in zip(a.steps, b.steps, strict=True)]
    same = [max(theirs, key=theirs.__getitem__) == max(mine, key=mine.__getitem__) for theirs, mine in pairs]
    return {"kld": fmean(divergence(*pair) for pair in pairs), "token_match": fmean(same)}


def more_metrics(rows: list[Row], metrics: dict[str, float]) -> dict[str, float]:
    """As `lanes.measure` derives metrics: agreement of second answers, and of open generations."""
    found = {}
    for row in [row for row in rows if "error" not in row]:
        found[f"{row['key']}.{row['run']}.agreement"] = row["agreement"]
        found |= {f"open{row['of']['decoded']}.{row['run']}.{what}": row[what] for what in ("kld", "token_match")}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Examination.add_arguments(parser, examples=16)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--texts", type=int, default=16, help="of the open generation")
    parser.add_argument("--decoded", type=int, default=1000, help="tokens of the open generation")
    parser.add_argument("--one-cache", action="store_true", help="cut prompts where the first answer begins")
    parser.add_argument("--run", nargs="+", required=True, help="NAME=POLICY:JSON")
    parser.add_argument("--seconds", type=float, help="leave out what has not ended by then")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    common = Examination.of(args, args.tokens)
    given = {field.name: getattr(common, field.name) for field in fields(common)}
    examination = SecondTurn(**given, texts=args.texts, decoded=args.decoded, one_cache=args.one_cache, work=args.work)
    measure(lanes_of(examination, read_runs(args.run)), args.out, args.seconds, derive=more_metrics)


if __name__ == "__main__":
    main()
