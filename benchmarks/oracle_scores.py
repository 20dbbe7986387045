"""Scores for the policy `oracle`, of the prompts that benchmarks.eval_tasks asks with the same arguments.

    python -m benchmarks.oracle_scores MODEL --tasks tasks.py --out DIR [--tokens 1024] [--examples 16] [--device cuda]
        [--kinds kvzip answer] [--multiquery] [--part I/N]
    python -m benchmarks.eval_tasks MODEL --tasks tasks.py --out FILE ... --run 'NAME=oracle:{"scores": "DIR/kvzip"}'

A file per prompt in DIR/kvzip and DIR/answer; what is there already stays. With --multiquery contexts are cut, and so
scored, and not whole prompts. Answers are stock vLLM's greedy ones. --part 2/4 is the second of four processes that
share the work.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.engine import engine
from benchmarks.eval_tasks import Examination, context_end, load_tokenizer
from vllm_kvplug import compat
from vllm_kvplug.eval.oracle import KINDS, Prompt, unscored, write_scores


def part(text: str) -> tuple[int, int]:
    """(I, N) of I/N."""
    number, count = (int(one) for one in text.split("/"))
    if not 1 <= number <= count:
        raise ValueError(text)
    return number, count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Examination.add_arguments(parser, examples=16)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--multiquery", action="store_true", help="contexts are cut before questions are seen")
    parser.add_argument("--part", type=part, default=(1, 1), metavar="I/N", help="of the prompts")
    args = parser.parse_args()
    examination = Examination.of(args, args.tokens, args.multiquery)
    asked, tokenizer = examination.asked, load_tokenizer(args.model)
    number, count = args.part
    for kind in args.kinds:
        todo = [asked[i] for i in unscored(args.out / kind, [e["ids"] for e in asked]) if i % count == number - 1]
        answers: list[tuple[int, ...]] = [()] * len(todo)
        if kind == "answer" and todo:
            with engine(**examination.arguments) as llm:
                found = compat.generate(llm, [e["ids"] for e in todo], [e["max_tokens"] for e in todo])
            answers = [tuple(answer.token_ids) for answer in found]
        cuts = [context_end(tokenizer, e) if args.multiquery else len(e["ids"]) for e in todo]
        prompts = [Prompt(e["ids"], cut, answer) for e, cut, answer in zip(todo, cuts, answers, strict=True)]
        write_scores(args.model, tokenizer, kind, prompts, args.out / kind, args.device)


if __name__ == "__main__":
    main()
