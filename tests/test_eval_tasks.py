"""What an engine shows of itself while it is examined."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from engine_tools import one_thread  # noqa: F401
from serve_tools import add_tokenizer

from benchmarks import eval_tasks
from benchmarks.engine import Turns
from benchmarks.eval_tasks import Examination
from vllm_kvplug.policies.registry import policy_class

TASKS = '''
"""A task whose answer nobody could know; every answer is right."""

TASKS = ["count"]


def counter(model):
    return len


def make(task, tokens, seed, index, split, count):
    text = " ".join(["the cache of a head keeps what its last queries read"] * 40)
    messages = [{"role": "user", "content": text + " How many?"}]
    return {"task": task, "prompt_messages": messages, "answer": "4", "meta": {"question_chars": 10}}


def score(task, meta, output, answer):
    return 1.0
'''


@pytest.fixture(scope="module")
def examination(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Examination:
    folder = tmp_path_factory.mktemp("examination")
    (folder / "tasks.py").write_text(TASKS)
    model = add_tokenizer(tiny_model_dir, folder / "model")
    return Examination(str(model), folder / "tasks.py", 1024, 2, 0, "float32", 4, timed=1)


def test_examples_do_not_depend_on_where_they_are_made(examination: Examination, monkeypatch: pytest.MonkeyPatch):
    apart = replace(examination, examples=eval_tasks.MANY).asked
    monkeypatch.setattr(eval_tasks, "MANY", 1000)
    eval_tasks.asked_of.cache_clear()
    assert replace(examination, examples=len(apart)).asked == apart and len(apart) == 20


@pytest.mark.parametrize("policy, knobs", [(None, {}), ("snapkv", {"ratio": 0.5}), ("streaming", {"window": 60})])
def test_what_requests_hold(policy: str | None, knobs: dict, examination: Examination, tmp_path: Path):
    """Bytes of blocks and page tables, and tokens that heads store, are those that the policy promises."""
    found = examination.run(policy, knobs, Turns(tmp_path))
    prompt, float32 = found.prompt_tokens, 4
    of_a_token = 3 * 2 * 2 * 32 * float32  # layers, KV heads, K and V, head dim
    assert found.scores == [1.0, 1.0] and found.tpot_ms > 0 and found.host_bytes == 0
    if policy is None:
        assert found.stored_ratio is None and found.held_bytes == pytest.approx(of_a_token, rel=0.2)
        return
    kept = {"snapkv": prompt / 2, "streaming": 64}[policy_class(policy).name]
    assert found.stored_ratio == pytest.approx(kept / prompt, rel=0.1)
    tables = 1 + (4 * 16 + 4) / (16 * 2 * 32 * float32)  # a position for every token, and an id for every page
    assert found.held_bytes == pytest.approx(of_a_token * tables * kept / prompt, rel=0.15)
