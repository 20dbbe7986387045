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
        """From a Hugging Face tokenizer; None if it has no chat template, or one that takes no system prompt."""
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": USER}]
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception:  # templates are programs of strangers, and raise what they like
            return None
        opening, found, rest = text.partition(SYSTEM)
        between, user_found, _ = rest.partition(USER)
        if not (opening and found and between and user_found):
            return None
        first, last = (tuple(tokenizer.encode(part, add_special_tokens=False)) for part in (opening, between))
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
