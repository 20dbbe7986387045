"""What an oracle knows of a prompt: scores that the model itself gives every token in every head, computed offline.

kvzip   KVzip's reconstruction scores (2505.23416): the most attention that a token gets while the model repeats the
        prompt, whatever is asked of it. What Fast KVzip's gate estimates.
answer  the most attention that a token gets while full attention gives its own greedy answer. That answer and not the
        right one: it is what full attention uses, also where it is wrong, and needs nothing but the prompt.

Shapes: L layers, H KV heads, T tokens that are cut.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from vllm_kvplug.gates.targets import Frame, attention_paid, reading, reconstruction_targets

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


def _at(prompt: Tensor, start: int, part: Tensor) -> bool:
    return torch.equal(prompt[start : start + len(part)], part)
