"""Finds the system prompt among a prompt's token ids, where the model's chat template shows how it is framed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

SYSTEM, USER = "kvplugsystemtext", "kvplugusertext"
BEGINNINGS = (SYSTEM, "\n", " ", "  ", "1", ".", ",", "\u00e9")
"""Of a system prompt: its first characters may merge with the last ones of what stands before it."""


@dataclass(frozen=True)
class SystemPrompt:
    """opening: the first token ids of a prompt that begins with a system prompt. closing: the one that ends it.

    The closing token must be one that no text can merge with, or else what ends a system prompt would depend on its
    last characters, and a user who writes the same could end it instead.
    """

    opening: tuple[int, ...]
    closing: int

    @classmethod
    def of(cls, tokenizer: Any) -> SystemPrompt | None:
        """From a Hugging Face tokenizer; None if its chat template does not tell a system prompt from a user's."""
        try:
            return next((frame for frame in cls._candidates(tokenizer) if frame._holds_for(tokenizer)), None)
        except Exception:  # templates are programs of strangers, and raise what they like
            return None

    @classmethod
    def _candidates(cls, tokenizer: Any) -> Iterator[SystemPrompt]:
        before, between = _frame(tokenizer)
        alone = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
        closing = next((token for token in _encode(tokenizer, between) if token in alone), None)
        if closing is None:
            return
        opening = _common(_encode(tokenizer, before + beginning) for beginning in BEGINNINGS)
        role = max((i + 1 for i, token in enumerate(opening) if token in alone), default=0)
        while role < len(opening) and not re.search(r"\s", tokenizer.decode([opening[role]])):
            role += 1
        yield cls(opening[:role], closing)  # what follows the role may change: some templates put the date there
        yield cls(opening, closing)

    def _holds_for(self, tokenizer: Any) -> bool:
        """Whether it finds the system's text, and a user's only outside of it, whatever the user writes."""
        _, between = _frame(tokenizer)
        found = self._text(tokenizer, _render(tokenizer, system=SYSTEM, user=USER))
        without = self._text(tokenizer, _render(tokenizer, user=USER + between + USER))
        return bool(self.opening) and SYSTEM in found and USER not in found + without

    def _text(self, tokenizer: Any, text: str) -> str:
        ids = _encode(tokenizer, text)
        start, end = self.find(ids) or (0, 0)
        return tokenizer.decode(ids[start:end])

    def find(self, prompt: Sequence[int]) -> tuple[int, int] | None:
        """The range [0, end) of a prompt that opens with a system prompt, its frame included."""
        size = len(self.opening)
        if tuple(prompt[:size]) != self.opening:
            return None
        return next(((0, i + 1) for i in range(size, len(prompt)) if prompt[i] == self.closing), None)


def _render(tokenizer: Any, **texts: str) -> str:
    messages = [{"role": role, "content": text} for role, text in texts.items()]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def _frame(tokenizer: Any) -> tuple[str, str]:
    """What the template puts before a system prompt, and between it and the user's text; nothing if it does not."""
    before, _, rest = _render(tokenizer, system=SYSTEM, user=USER).partition(SYSTEM)
    between, user, _ = rest.partition(USER)
    return (before, between) if user else ("", "")


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def _common(rows: Iterator[list[int]]) -> tuple[int, ...]:
    """The beginning that all rows share."""
    columns = list(zip(*rows, strict=False))
    equal = [len(set(column)) == 1 for column in columns]
    return tuple(column[0] for column in columns[: (equal + [False]).index(False)])
