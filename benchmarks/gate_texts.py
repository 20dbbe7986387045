"""Texts to train gates on: our tasks, from seeds that no evaluation uses, and documents of installed packages.

    python -m benchmarks.gate_texts OUT.jsonl --tokenizer MODEL [--tokens 400000] [--length 4096]
        [--tasks tasks.py] [--chat]

Half of the tokens are of each kind. With --chat the tasks are conversations in the model's chat template, as a server
sees them; without, plain text for trainings that put a template around it. What the packages hold depends on their
versions, so a gate's metadata names the file by its hash.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from benchmarks.eval_tasks import load_tasks
from vllm_kvplug.eval.tasks import TASKS, make

Count = Callable[[str], int]
"""Tokens of a text."""

SEED = 7_000_003
SHORTEST = 2_000
"""Characters of the shortest document."""


def own_tasks(count: Count, length: int) -> Iterator[tuple[str, str]]:
    """(prompt, answer) of this project's tasks in turn, of two lengths, from a seed that no evaluation uses."""
    for index in itertools.count():
        for task in TASKS:
            example = make(task, length if index % 2 else length // 2, SEED, index, count)
            yield f"{example.context}\n\n{example.question}", example.answer


def split_tasks(source: Any, count: Count, length: int) -> Iterator[tuple[str, str]]:
    """The same of the train split of a task file, as `benchmarks.eval_tasks` reads one."""
    for index in itertools.count():
        for task in source.TASKS:
            example = source.make(task, length if index % 2 else length // 2, SEED, index, "train", count)
            yield example["prompt_messages"][-1]["content"], example["answer"]


def documents() -> Iterator[str]:
    """Descriptions and documentation of installed packages, in the order of their names; no text twice."""
    seen = set()
    for package in sorted(distributions(), key=lambda d: d.name.lower()):
        for file in sorted(package.files or [], key=str):
            name = file.name.lower()
            if not (name == "metadata" or name.endswith((".md", ".rst"))) or "license" in name:
                continue
            text = Path(str(file.locate())).read_text(errors="ignore") if Path(str(file.locate())).is_file() else ""
            text = text.partition("\n\n")[2] if name == "metadata" else text
            if len(text) >= SHORTEST and text not in seen:
                seen.add(text)
                yield text


def main() -> None:
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", required=True, metavar="MODEL")
    parser.add_argument("--tokens", type=int, default=400_000)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a task's prompt and answer, at most")
    parser.add_argument("--tasks", type=Path, help="a task file with a train split, instead of this project's tasks")
    parser.add_argument("--chat", action="store_true", help="tasks as conversations in the model's chat template")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    def text_of(prompt: str, answer: str) -> str:
        if not args.chat:
            return f"{prompt}\n\n{answer}"
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        return tokenizer.apply_chat_template(turns, tokenize=False)

    examples = split_tasks(load_tasks(args.tasks), count, args.length) if args.tasks else own_tasks(count, args.length)
    with args.out.open("w") as out:
        for source in (itertools.starmap(text_of, examples), documents()):
            taken = 0
            for text in source:
                out.write(json.dumps({"text": text}) + "\n")
                taken += count(text)
                if taken >= args.tokens // 2:
                    break


if __name__ == "__main__":
    main()
