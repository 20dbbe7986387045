"""Chats as token ids, and how many of them come before a question is known."""

from __future__ import annotations

from os.path import commonprefix
from typing import Any

Messages = list[dict[str, str]]

WITHOUT_CONTEXT_END = ("streaming", "wgkv", "wgkv+quest", "wgkv+snapkv", "wgkv+yakv")
"""Policies that treat a context as they treat a question, and so have no option to tell one from the other."""


def chat_ids(tokenizer: Any, messages: Messages) -> list[int]:
    """Token ids of a chat in the model's template, up to where the answer begins."""
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def context_tokens(tokenizer: Any, messages: Messages, context_chars: int) -> int:
    """How many of a chat's first tokens do not depend on what follows `context_chars` characters of its last message.

    The value of `kvplug.context_end` for one of several questions about a context.
    """
    *before, last = messages
    alone = [*before, {**last, "content": last["content"][:context_chars]}]
    return len(commonprefix([chat_ids(tokenizer, messages), chat_ids(tokenizer, alone)]))
