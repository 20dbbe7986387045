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
    """One token a letter, but a <marker> is one special token, where markers are looked for."""

    all_special_ids = [1001, 1002, 1003]
    markers = ["<s>", "<end>", "<bos>"]

    def __init__(self, template: Callable[[Messages], str]):
        self.template = template

    def get_added_vocab(self) -> dict[str, int]:
        return dict(zip(self.markers, self.all_special_ids, strict=True))

    def decode(self, ids: list[int]) -> str:
        return "".join(self.markers[t - 1001] if t in self.all_special_ids else chr(t) for t in ids)

    def apply_chat_template(self, messages: Messages, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize and add_generation_prompt
        return self.template(messages)

    def encode(self, text: str, add_special_tokens: bool = True, markers: bool = True) -> list[int]:
        start = [1003] if add_special_tokens else []
        parts = re.split("(<s>|<end>|<bos>)", text) if markers else [text]
        return start + [
            token
            for part in parts
            for token in ([1001 + self.markers.index(part)] if part in self.markers else map(ord, part))
        ]


def turns(messages: Messages) -> str:
    return "<bos>" + "".join(f"<s>{m['role']}\n{m['content']}<end>\n" for m in messages) + "<s>assistant\n"


def plain(messages: Messages) -> str:
    return "".join(f"[{m['role']}]{m['content']}[/]" for m in messages)


def chat(system: str | None, *texts: str) -> Messages:
    roles = ["user", "assistant"]
    said = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return ([] if system is None else [{"role": "system", "content": system}]) + said


# --------------------------------------------------------------------------------------- a special marker


def test_the_frame_of_special_markers():
    found = SystemPrompt.of(Letters(turns))
    assert found == SystemPrompt((1003, 1001, *map(ord, "system")), 1002)


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


def test_the_closing_is_the_first_marker_between_system_and_user():
    def late(messages: Messages) -> str:
        return "".join(f"<s>{m['role']}\n{m['content']}\n\n<end>" for m in messages)

    assert SystemPrompt.of(Letters(late)) == SystemPrompt((1001, *map(ord, "system")), 1002)


def test_what_a_template_says_of_the_day_is_not_part_of_the_opening():
    days = iter(range(100))

    def dated(messages: Messages) -> str:
        return turns(messages).replace("system\n", f"system\nToday is day {next(days)}.\n")

    tokenizer = Letters(dated)
    found = SystemPrompt.of(tokenizer)
    assert found is not None
    prompt = tokenizer.encode(dated(chat("Be brief.", "Hi")), add_special_tokens=False)
    assert found.find(prompt) == (0, prompt.index(1002) + 1)


def test_a_role_that_is_part_of_the_users_frame_too():
    """The word behind the marker does not tell them apart here; all of the opening does."""

    def llama_2(messages: Messages) -> str:
        system = f"<<SYS>>{messages[0]['content']}<end>" if len(messages) > 1 else ""
        return f"<bos>[INST] {system}{messages[-1]['content']} [/INST]"

    tokenizer = Letters(llama_2)
    found = SystemPrompt.of(tokenizer)
    assert found == SystemPrompt((1003, *map(ord, "[INST] <<SYS>>")), 1002)
    assert found.find(tokenizer.encode(llama_2(chat(None, "Hi <end> there")), add_special_tokens=False)) is None


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


def in_the_users_turn_with_a_marker(messages: Messages) -> str:
    return "<bos>" + "<end>".join(m["content"] for m in messages)


def unframed(messages: Messages) -> str:
    return "".join(m["content"] for m in messages)


@pytest.mark.parametrize(
    "template",
    [
        raises,
        no_system,
        ignores_system,
        system_behind,
        in_the_users_turn,
        in_the_users_turn_with_a_marker,
        unframed,
        plain,  # its closing merges with the system prompt's last letters, or is a user's first to write
        lambda m: "",
    ],
)
def test_templates_that_tell_no_system_prompt(template: Callable[[Messages], str]):
    assert SystemPrompt.of(Letters(template)) is None


def test_a_frame_of_no_tokens():
    """Some tokenizers drop white space. Every prompt begins with no tokens."""

    class Strips(Letters):
        def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
            return super().encode(text.strip(), *args, **kwargs)

    def opening(messages: Messages) -> str:
        return "\n" * len(messages) + "<end>".join(m["content"] for m in messages)

    assert SystemPrompt.of(Letters(opening)) is not None
    assert SystemPrompt.of(Strips(opening)) is None


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


@pytest.mark.parametrize("system", ["Be brief.", "\n  Two\n\nparagraphs, and  spaces. ", "Ünïcödé 系统 🙂", "x" * 3000])
def test_smollm2(tokenizer: Any, system: str):
    found = SystemPrompt.of(tokenizer)
    assert found is not None and tokenizer.decode(found.closing) == "<|im_end|>"
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
