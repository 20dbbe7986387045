"""What an oracle knows of a prompt: scores that the model itself gives every token in every head, computed offline.

kvzip   KVzip's reconstruction scores (2505.23416): the most attention that a token gets while the model repeats the
        prompt, whatever is asked of it. What Fast KVzip's gate estimates.
answer  the most attention that a token gets while full attention gives its own greedy answer. That answer and not the
        right one: it is what full attention uses, also where it is wrong, and needs nothing but the prompt.

Shapes: L layers, H KV heads, T tokens that are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from vllm_kvplug.calibrate.profile import ProfiledModel
from vllm_kvplug.gates.backbone import Backbone
from vllm_kvplug.gates.targets import Frame, attention_paid, reading, reconstruction_targets
from vllm_kvplug.policies.oracle import Kind, ScoresMetadata, save_scores, scores_name, scores_path

KINDS: tuple[Kind, ...] = get_args(Kind)

CHUNK = 2000
"""Tokens repeated at a time, as in the authors' code."""


def kvzip_scores(model: PreTrainedModel, frame: Frame, prompt: Tensor) -> Tensor:
    """The T tokens of a prompt, int64 on the CPU -> float32 [L, H, T], on the CPU.

    What surrounds a user's message in the chat template is not repeated: its score is 1, the largest.
    """
    first = len(frame.before) if _at(prompt, 0, frame.before) else 0
    last = len(prompt) - len(frame.answer)
    last = last if last > first and _at(prompt, last, frame.answer) else len(prompt)
    within = Frame(prompt[:first], frame.first, frame.later, frame.answer)
    found = reconstruction_targets(model, within, prompt[first:last], CHUNK)
    return torch.nn.functional.pad(found, (first, len(prompt) - last), value=1.0)


def answer_scores(model: PreTrainedModel, tokens: Tensor, cut: int) -> Tensor:
    """Scores of the first `cut` >= 2 of a prompt's tokens, float32 [L, H, cut], on the CPU.

    tokens: of prompt and answer, int64 on the CPU, without the answer's last, which asks for nothing any more. Queries
    are those from the last token that is cut, which is the prompt's last unless a question follows its context. That
    token's own score is 1, the largest: a policy's window keeps it.
    """
    paid = attention_paid(model, reading(model, tokens[: cut - 1]), tokens[cut - 1 :], 0, 0, cut - 1)
    return torch.nn.functional.pad(paid, (0, 1), value=1.0)


@dataclass(frozen=True)
class Prompt:
    """Token ids of a prompt, and how many of its first tokens are cut. answer: full attention's greedy one, as ids."""

    ids: list[int]
    cut: int
    answer: tuple[int, ...] = ()


def unscored(folder: Path, prompts: Sequence[list[int]]) -> list[int]:
    """Numbers of the prompts, as token ids, that have no file of scores in the folder."""
    return [i for i, ids in enumerate(prompts) if not scores_path(folder, scores_name(ids)).exists()]


def write_scores(model: str, tokenizer: Any, kind: Kind, prompts: Sequence[Prompt], folder: Path, device: str) -> None:
    """Compute a file of scores for every prompt; those of kind `answer` need its answer."""
    backbone = Backbone(Path(model), device)
    frame, metadata = Frame.of(tokenizer), ScoresMetadata(kind=kind, model=ProfiledModel.of(backbone.config, model))
    for prompt in tqdm(prompts, desc=f"scores {kind}"):
        if kind == "kvzip":
            scores = kvzip_scores(backbone.model, frame, torch.tensor(prompt.ids[: prompt.cut]))
        else:
            scores = answer_scores(backbone.model, torch.tensor([*prompt.ids, *prompt.answer[:-1]]), prompt.cut)
        save_scores(folder, prompt.ids, scores, metadata)


def _at(prompt: Tensor, start: int, part: Tensor) -> bool:
    return torch.equal(prompt[start : start + len(part)], part)
