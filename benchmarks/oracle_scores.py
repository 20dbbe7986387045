"""Scores for the policy `oracle`, of the prompts that benchmarks.eval_tasks asks with the same arguments.

    python -m benchmarks.oracle_scores MODEL --tasks tasks.py --out DIR [--tokens 1024] [--examples 16] [--device cuda]
        [--kinds kvzip answer] [--multiquery]
    python -m benchmarks.eval_tasks MODEL --tasks tasks.py --out FILE ... --run 'NAME=oracle:{"scores": "DIR/kvzip"}'

A file per prompt in DIR/kvzip and DIR/answer; what is there already stays. With --multiquery contexts are cut, and so
scored, and not whole prompts. Answers are stock vLLM's greedy ones.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.engine import engine
from benchmarks.eval_tasks import Examination, answers, context_tokens
from vllm_kvplug.calibrate.profile import ProfiledModel
from vllm_kvplug.eval.oracle import answer_scores, kvzip_scores
from vllm_kvplug.gates.backbone import load_backbone
from vllm_kvplug.gates.targets import Frame
from vllm_kvplug.policies.oracle import ScoresMetadata, save_scores, scores_name, scores_path


def missing(folder: Path, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Examples without a file in the folder."""
    return [e for e in asked if not scores_path(folder, scores_name(e["ids"])).exists()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Examination.add_arguments(parser, tokens=1024, examples=16)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--kinds", nargs="+", choices=["kvzip", "answer"], default=["kvzip", "answer"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--multiquery", action="store_true", help="contexts are cut before questions are seen")
    args = parser.parse_args()
    examination = replace(Examination.of(args), multiquery=args.multiquery)
    _, tokenizer, asked = examination.source
    todo = {kind: missing(args.out / kind, asked) for kind in args.kinds}

    greedy: list[list[int]] = []
    if todo.get("answer"):
        with engine(**examination.arguments) as llm:
            found = answers(llm, todo["answer"], [{} for _ in todo["answer"]])
            greedy = [list(answer.token_ids) for answer in found]

    model, frame = load_backbone(Path(args.model), args.device), Frame.of(tokenizer)
    described = ProfiledModel.of(model.config, Path(args.model).name)

    def cut(example: dict[str, Any]) -> int:
        return context_tokens(tokenizer, example) if args.multiquery else len(example["ids"])

    for example in tqdm(todo.get("kvzip", []), desc="kvzip"):
        scores = kvzip_scores(model, frame, torch.tensor(example["ids"][: cut(example)]))
        save_scores(args.out / "kvzip", example["ids"], scores, ScoresMetadata(kind="kvzip", model=described))
    for example, answer in tqdm(list(zip(todo.get("answer", []), greedy, strict=True)), desc="answer"):
        scores = answer_scores(model, torch.tensor(example["ids"] + answer[:-1]), cut(example))
        save_scores(args.out / "answer", example["ids"], scores, ScoresMetadata(kind="answer", model=described))


if __name__ == "__main__":
    main()
