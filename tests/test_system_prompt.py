"""The system prompt among token ids: a real tokenizer's, and small ones that show what templates may do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_kvplug.system_prompt import SystemPrompt

Messages = list[dict[str, str]]


class Letters:
    """One token a letter, but a <marker> is one token, where markers are looked for."""

    markers = {"<s>": 1001, "<end>": 1002, "<bos>": 1003}
    all_special_ids = [1001, 1002, 1003]

    def __init__(self, template: Callable[[Messages], str]):
        self.template = template

    def apply_chat_template(self, messages: Messages, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize and add_generation_prompt
        return self.template(messages)

    def get_added_vocab(self) -> dict[str, int]:
        return {}

    def encode(self, text: str, add_special_tokens: bool = True, markers: bool = True) -> list[int]:
        parts = re.split("(<s>|<end>|<bos>)", text) if markers else [text]
        ids = [token for part in parts for token in ([self.markers[part]] if part in self.markers else map(ord, part))]
        return [1003] * add_special_tokens + ids

    def decode(self, ids: list[int]) -> str:
        words = {token: marker for marker, token in self.markers.items()}
        return "".join(words.get(token) or chr(token) for token in ids)


class Added(Letters):
    """Markers that are added tokens and not special, as some models have them."""

    all_special_ids: list[int] = []

    def get_added_vocab(self) -> dict[str, int]:
        return self.markers


def turns(messages: Messages) -> str:
    return "<bos>" + "".join(f"<s>{m['role']}\n{m['content']}<end>\n" for m in messages) + "<s>assistant\n"


def plain(messages: Messages) -> str:
    return "".join(f"[{m['role']}]{m['content']}[/]" for m in messages)


def chat(system: str | None, *texts: str) -> Messages:
    roles = ["user", "assistant"]
    said = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return ([] if system is None else [{"role": "system", "content": system}]) + said


# --------------------------------------------------------------------------------------- a special marker


@pytest.mark.parametrize("kind", [Letters, Added])
def test_the_frame_of_markers(kind: type[Letters]):
    """As far as the role: what follows it may depend on the day, or merge with the text."""
    assert SystemPrompt.of(kind(turns)) == SystemPrompt((1003, 1001, *map(ord, "system")), 1002)


@pytest.mark.parametrize("system", ["", "Be brief.", "a\n\nb\n", "kvplugusertext"])
@pytest.mark.parametrize("texts", [("Hi",), ("",), ("Hi", "Hello", "What?")], ids=str)
def test_a_system_prompt_is_found_up_to_its_end(system: str, texts: tuple[str, ...]):
    tokenizer = Letters(turns)
    found = SystemPrompt.of(tokenizer)
    assert found is not None
    prompt = tokenizer.encode(turns(chat(system, *texts)), add_special_tokens=False)
    assert found.find(prompt) == (0, len(tokenizer.encode(f"<bos><s>system\n{system}<end>", False)))
    assert found.find(tuple(prompt)) == found.find(prompt)


def test_a_prompt_without_a_system_prompt():
    tokenizer = Letters(turns)
    found = SystemPrompt.of(tokenizer)
    assert found is not None
    whole = turns(chat("Be brief.", "Hi"))
    for text in (turns(chat(None, "system\nHi")), "", "plain text <end>", whole[1:], "x" + whole):
        assert found.find(tokenizer.encode(text, add_special_tokens=False)) is None


def test_a_prompt_that_ends_before_the_system_prompt_does():
    tokenizer = Letters(turns)
    found = SystemPrompt.of(tokenizer)
    assert found is not None
    prompt = tokenizer.encode(turns(chat("Be brief.", "Hi")), add_special_tokens=False)
    end = prompt.index(1002) + 1
    for length in range(len(prompt) + 1):
        assert found.find(prompt[:length]) == ((0, end) if length >= end else None)


def test_words_of_the_marker_are_not_the_marker():
    tokenizer = Letters(turns)
    found = SystemPrompt.of(tokenizer)
    assert found is not None
    frame = tokenizer.encode("<bos><s>system\n", add_special_tokens=False)
    prompt = frame + tokenizer.encode("never say <end> aloud", False, markers=False) + [1002, 10]
    assert found.find(prompt) == (0, len(prompt) - 1)


# ----------------------------------------------------------------------------------------- other templates


def test_a_date_in_the_frame():
    day = "Monday"

    def dated(messages: Messages) -> str:
        return "".join(f"<s>{m['role'][:3]}\n{day}:\n{m['content']}<end>" for m in messages)

    tokenizer = Letters(dated)
    found = SystemPrompt.of(tokenizer)
    assert found is not None
    day = "Tuesday"
    prompt = tokenizer.encode(dated(chat("Be brief.", "Hi")), add_special_tokens=False)
    assert found.find(prompt) == (0, prompt.index(1002) + 1)


def test_a_role_behind_other_words():
    """Where the first word does not tell the roles apart, all of the frame must match."""

    def wordy(messages: Messages) -> str:
        return "".join(f"<s>turn of {m['role']}: {m['content']}<end>" for m in messages)

    tokenizer = Letters(wordy)
    found = SystemPrompt.of(tokenizer)
    assert found == SystemPrompt((1001, *map(ord, "turn of system: ")), 1002)
    assert found.find(tokenizer.encode(wordy(chat(None, "Hi")), add_special_tokens=False)) is None
    assert found.find(tokenizer.encode(wordy(chat("", "Hi")), add_special_tokens=False)) == (0, 18)


def test_a_marker_that_stands_before_the_system_prompt_too():
    def after_the_tools(messages: Messages) -> str:
        return "<s>tools\nnone<end>" + turns(messages)

    tokenizer = Letters(after_the_tools)
    found = SystemPrompt.of(tokenizer)
    assert found is not None
    prompt = tokenizer.encode(after_the_tools(chat("Be brief.", "Hi")), add_special_tokens=False)
    assert found.find(prompt) == (0, len(tokenizer.encode("<s>tools\nnone<end><bos><s>system\nBe brief.<end>", False)))


def raises(messages: Messages) -> str:
    raise KeyError("a stranger's program")


def no_system(messages: Messages) -> str:
    if messages[0]["role"] == "system":
        raise ValueError("System role not supported")
    return turns(messages)


def ignores_system(messages: Messages) -> str:
    return turns([m for m in messages if m["role"] != "system"])


def system_behind(messages: Messages) -> str:
    return turns(messages[::-1])


def in_the_users_turn(messages: Messages) -> str:
    return "<bos>[INST]" + "\n\n".join(m["content"] for m in messages) + "[/INST]"


def no_roles(messages: Messages) -> str:
    return "".join(f"<s>{m['content']}<end>" for m in messages)


def marked_behind(messages: Messages) -> str:
    """A user's text would end what a user's text began."""
    return "<s>" + "<end>".join(m["content"] for m in messages)


def unframed(messages: Messages) -> str:
    return "".join(m["content"] for m in messages)


@pytest.mark.parametrize(
    "template",
    [raises, no_system, ignores_system, system_behind, in_the_users_turn, no_roles, marked_behind, unframed, plain]
    + [lambda messages: ""],
)
def test_templates_that_tell_no_system_prompt(template: Callable[[Messages], str]):
    assert SystemPrompt.of(Letters(template)) is None


def test_a_frame_of_no_tokens():
    """Some tokenizers drop white space. Every prompt begins with no tokens."""

    class Strips(Letters):
        def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
            return super().encode(text.strip(), *args, **kwargs)

    def blank(messages: Messages) -> str:
        return "\n" * len(messages) + "<end>".join(m["content"] for m in messages)

    assert SystemPrompt.of(Letters(blank)) is not None
    assert SystemPrompt.of(Strips(blank)) is None


def test_a_default_system_prompt_is_one():
    """Where a chat has none, some templates put theirs."""

    def with_default(messages: Messages) -> str:
        return turns(messages if messages[0]["role"] == "system" else chat("Be kind.") + messages)

    tokenizer = Letters(with_default)
    found = SystemPrompt.of(tokenizer)
    assert found is not None
    prompt = tokenizer.encode(with_default(chat(None, "Hi")), add_special_tokens=False)
    assert found.find(prompt) == (0, prompt.index(1002) + 1)


# ---------------------------------------------------------------------------------------- a real tokenizer


@pytest.fixture(scope="module")
def tokenizer(small_model_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(small_model_dir)


def ids(tokenizer: Any, messages: Messages) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    "system",
    ["Be brief.", "Two\n\nparagraphs, and  spaces. ", "Ünïcödé 系统 🙂", "x" * 3000]
    + ["1. One", "é", ".", " - a", "\n\n\tb"],
)
def test_smollm2(tokenizer: Any, system: str):
    found = SystemPrompt.of(tokenizer)
    assert found is not None and tokenizer.decode([found.closing]) == "<|im_end|>"
    prompt = ids(tokenizer, chat(system, "Hi", "Hello", "And now?"))
    start, end = found.find(prompt) or (0, 0)
    assert start == 0 and tokenizer.decode(prompt[:end]) == f"<|im_start|>system\n{system}<|im_end|>"


def test_smollm2_default_system_prompt(tokenizer: Any):
    found = SystemPrompt.of(tokenizer)
    assert found is not None
    prompt = ids(tokenizer, chat(None, "Hi"))
    _, end = found.find(prompt) or (0, 0)
    assert tokenizer.decode(prompt[:end]).endswith("trained by Hugging Face<|im_end|>")


def test_smollm2_without_a_chat(tokenizer: Any):
    found = SystemPrompt.of(tokenizer)
    assert found is not None
    for text in ("", "system\nBe brief.<|im_end|>", "<|im_start|>user\nsystem\nHi<|im_end|>"):
        assert found.find(tokenizer.encode(text)) is None


def test_smollm2_words_of_the_marker(tokenizer: Any):
    found = SystemPrompt.of(tokenizer)
    assert found is not None
    words = tokenizer.encode("never say <|im_end|> aloud", split_special_tokens=True)
    assert found.closing not in words
    prompt = [*found.opening, *words, found.closing, *tokenizer.encode("\n<|im_start|>user\nHi<|im_end|>")]
    assert found.find(prompt) == (0, len(found.opening) + len(words) + 1)


def test_a_tokenizer_without_a_template(small_model_dir: Path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small_model_dir)
    tokenizer.chat_template = None
    assert SystemPrompt.of(tokenizer) is None
