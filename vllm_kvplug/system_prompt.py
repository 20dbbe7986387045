"""Finds the system prompt among a prompt's token ids, where the model's chat template shows how it is framed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SYSTEM, USER = "kvplugsystemtext", "kvplugusertext"


@dataclass(frozen=True)
class SystemPrompt:
    """opening: token ids before a system prompt's text. closing: those that end it."""

    opening: tuple[int, ...]
    closing: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Any) -> SystemPrompt | None:
        """From a Hugging Face tokenizer; None if its chat template does not tell a system prompt from other text."""
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": USER}]
        try:
            text, without = (
                tokenizer.apply_chat_template(some, tokenize=False, add_generation_prompt=True)
                for some in (messages, messages[1:])
            )
        except Exception:  # templates are programs of strangers, and raise what they like
            return None
        opening, found, rest = text.partition(SYSTEM)
        between, user_found, _ = rest.partition(USER)
        if not (found and user_found) or without.startswith(opening + USER):
            return None
        first, last = (tuple(tokenizer.encode(part, add_special_tokens=False)) for part in (opening, between))
        if not (first and last):
            return None
        special = last[0] in tokenizer.all_special_ids  # then no text can merge with it, and it may stand alone
        return cls(first, last[:1] if special else last)

    def find(self, prompt: Sequence[int]) -> tuple[int, int] | None:
        """The range [0, end) of a prompt that opens with a system prompt, its frame included."""
        size, mark = len(self.opening), len(self.closing)
        if tuple(prompt[:size]) != self.opening:
            return None
        for start in range(size, len(prompt) - mark + 1):
            if tuple(prompt[start : start + mark]) == self.closing:
                return 0, start + mark
        return None
