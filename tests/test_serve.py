"""The real server over HTTP, under a policy: concurrent streams, a cancelled one, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serve_tools import (
    ARGUMENTS,
    ATTEMPTS,
    ENVIRONMENT,
    MAX_LEN,
    SERVE,
    Server,
    add_tokenizer,
    free_port,
    prompt_of,
    serving,
)

openai = pytest.importorskip("openai")
pytest.importorskip("prometheus_client")

BLOCKS = 160  # one is the null block; enough for one request of the maximum length


@pytest.fixture(scope="module", params=["tiny", "smollm2"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SnapKV at a quarter of the prompt; prompts are computed in chunks of up to 256 tokens."""
    folder = tmp_path_factory.mktemp("server")
    if request.param == "tiny":
        model = add_tokenizer(request.getfixturevalue("tiny_model_dir"), folder / "model")
    else:
        model = request.getfixturevalue("small_model_dir")
    flags = ["--kv-policy", "snapkv", "--kv-policy-config", json.dumps({"ratio": 0.25, "window": 16})]
    # A model may write white space for ever where JSON allows it.
    flags += ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']
    flags += ["--max-num-seqs", "4", "--max-num-batched-tokens", "256", "--num-gpu-blocks-override", str(BLOCKS)]
    with serving(request.param, model, folder, flags) as running:
        yield running


# ------------------------------------------------------------------------------------------------- tests


def test_the_log_says_what_runs(server: Server):
    log = server.log.read_text()
    (line,) = re.findall(r"KV policy snapkv: .*", log)
    assert "ratio=0.25" in line and "window=16" in line
    assert f"A prompt of {MAX_LEN} tokens takes 128 blocks while it is computed and 32 after." in line
    assert "KV policy memory:" in log and "Traceback" not in log


def test_concurrent_streams_and_one_cancelled(server: Server):
    """Four clients at once, each with its own prompt. Those that stay get what they get alone."""
    prompts = [prompt_of(words, seed) for seed, words in enumerate((40, 150, 260, 90))]
    cancelled, tokens = 2, 40
    endless = 1700  # a busy machine takes seconds to notice that a client has gone

    async def stream(index: int) -> tuple[str, Any]:
        pieces, usage = [], None
        events = await server.stream(prompts[index], endless if index == cancelled else tokens)
        async for event in events:
            usage = event.usage or usage
            pieces += [choice.text for choice in event.choices]
            if index == cancelled and len(pieces) >= 3:
                await events.close()
                break
        return "".join(pieces), usage

    async def work() -> tuple[Any, Any]:
        together = await asyncio.gather(*map(stream, range(4)))
        return together, [await server.complete(prompts[i], tokens) for i in range(4) if i != cancelled]

    def added(name: str) -> float:
        return after.get(name, 0) - before.get(name, 0)

    for _ in range(ATTEMPTS):
        before = server.wait_idle()
        together, singly = server.run(work)
        after = server.wait_idle()
        if together[cancelled][1] is None and added("vllm:request_success_total") == 6:
            break  # else this process slept until the endless one had ended
    stayed = [result for i, result in enumerate(together) if i != cancelled]
    for (text, usage), single in zip(stayed, singly, strict=True):
        assert text == single.choices[0].text
        assert usage.completion_tokens == single.usage.completion_tokens == tokens
        assert usage.prompt_tokens == single.usage.prompt_tokens
    assert together[cancelled][1] is None
    assert added("vllm:request_success_total") == added("vllm:request_success_total{length}") == 6
    assert added("vllm:num_preemptions_total") == 0
    assert added("vllm:prompt_tokens_total") >= sum(single.usage.prompt_tokens for single in singly) * 2
    assert 6 * tokens < added("vllm:generation_tokens_total") < 6 * tokens + endless  # the cancelled one was stopped
    assert after["vllm:kv_cache_usage_perc"] == 0


def test_long_prompts_leave_room_for_each_other(server: Server):
    """Four prompts of 44 blocks or more, in a pool that holds their answers only if each keeps a quarter.

    A prompt that kept its blocks would need 63 of the 159 at the end of its answer, and with two others
    somebody would be preempted.
    """
    if server.name == "smollm2":
        pytest.skip("a minute with this model, and not about the model")

    async def work() -> Any:
        return await asyncio.gather(*(server.complete(prompt_of(700, seed), 300) for seed in range(4)))

    before = server.wait_idle()
    answers = server.run(work)
    after = server.wait_idle()
    assert all(700 <= answer.usage.prompt_tokens < 720 for answer in answers)
    assert after["vllm:num_preemptions_total"] == before["vllm:num_preemptions_total"]
    assert after["vllm:kv_cache_usage_perc"] == 0


def test_usage_is_seen_while_a_request_runs(server: Server):
    usage, tokens = "vllm:kv_cache_usage_perc", 1500 if server.name == "tiny" else 60
    seen, _ = server.run(lambda: server.metrics_during(lambda: server.complete(prompt_of(300, 4), tokens), usage))
    most = 300 // 4 // 16 + tokens // 16 + 3
    assert max(metrics[usage] for metrics in seen) * (BLOCKS - 1) <= max(most, 20)  # 19 while the prompt is computed
    assert server.wait_idle()[usage] == 0


def test_logprobs(server: Server):
    options = {"logprobs": 3, "extra_body": {"ignore_eos": True, "return_tokens_as_token_ids": True}}
    answers = [server.run(lambda: server.complete(prompt_of(30, 1), 6, **options)) for _ in range(2)]
    logprobs, again = [answer.choices[0].logprobs for answer in answers]
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 6
    for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert len(top) == 3 and value <= 0
        assert top[token] == value == max(top.values())  # greedy
    assert again.tokens == logprobs.tokens
    assert again.token_logprobs == pytest.approx(logprobs.token_logprobs, abs=1e-4)


def test_two_choices(server: Server):
    """n=2 runs as two requests of one prompt, each with its own pages."""
    answer = server.run(lambda: server.complete(prompt_of(120, 2), 24, n=2, temperature=1.0, seed=7))
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert answer.usage.completion_tokens == 48
    assert answer.choices[0].text != answer.choices[1].text
    with pytest.raises(openai.BadRequestError):  # vLLM's own rule: greedy choices would be equal
        server.run(lambda: server.complete("the cache", 4, n=2))


def test_stop_strings(server: Server):
    prompt = prompt_of(50, 3)
    whole = server.run(lambda: server.complete(prompt, 60)).choices[0]
    assert whole.finish_reason == "length"
    late = [c for c in whole.text[8:] if c.isascii() and c.isalnum()]
    assert late, whole.text
    stopped = server.run(lambda: server.complete(prompt, 60, stop=[late[0], late[-1]])).choices[0]
    assert stopped.finish_reason == "stop" and stopped.stop_reason in (late[0], late[-1])
    end = min(whole.text.index(stop) for stop in (late[0], late[-1]))
    assert stopped.text == whole.text[:end]


def test_structured_output(server: Server):
    """The grammar constrains what a compressed request writes; prompts long enough to be cut down."""
    schema = {
        "type": "object",
        "properties": {"kept": {"enum": ["all", "some"]}, "pages": {"type": "boolean"}},
        "required": ["kept", "pages"],
        "additionalProperties": False,
    }

    async def work() -> list[Any]:
        return await asyncio.gather(
            server.complete(prompt_of(80, 1), 40, extra_body={"structured_outputs": {"choice": ["ring", "pages"]}}),
            server.complete(prompt_of(90, 2), 60, extra_body={"structured_outputs": {"json": schema}}),
            server.complete(prompt_of(70, 3), 40, extra_body={"structured_outputs": {"regex": "[0-9]{3}-[a-c]{2}"}}),
        )

    choice, document, matched = [answer.choices[0] for answer in server.run(work)]
    assert choice.text in ("ring", "pages") and choice.finish_reason == "stop"
    value = json.loads(document.text)
    assert value["kept"] in ("all", "some") and isinstance(value["pages"], bool)
    assert re.fullmatch("[0-9]{3}-[a-c]{2}", matched.text)


def test_a_prompt_that_is_too_long(server: Server):
    with pytest.raises(openai.BadRequestError) as caught:
        server.run(lambda: server.complete(prompt_of(4000, 0), 4))
    assert str(MAX_LEN) in str(caught.value)


def test_nothing_is_left(server: Server):
    """After all of the above: every block is free again, and nothing went wrong on the way."""
    metrics = server.wait_idle()
    assert metrics["vllm:kv_cache_usage_perc"] == 0
    assert metrics["vllm:num_requests_running"] == metrics["vllm:num_requests_waiting"] == 0
    assert metrics.get("vllm:request_success_total{error}", 0) == 0
    assert "Traceback" not in server.log.read_text()


# --------------------------------------------------------------------------------------------- wrong flags


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--kv-policy", "nope"], ["--kv-policy nope: no such policy. Known policies:", "snapkv"]),
        (["--kv-policy", "heterocache"], ["no shipped head profile", "--kv-policy-config"]),
    ],
    ids=str,
)
def test_wrong_flags_end_the_server_at_once(tiny_model_dir: Path, flags: list[str], words: list[str]):
    """One line, no traceback, and no engine was started."""
    command = [*SERVE, str(tiny_model_dir), "--skip-tokenizer-init", "--port", str(free_port()), *ARGUMENTS, *flags]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **ENVIRONMENT}, timeout=180)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("kvplug: ")
    for word in words:
        assert word in last
    output = done.stdout + done.stderr
    assert "Traceback" not in output and "EngineCore" not in output and "oading" not in output


def test_knobs_that_are_not_json(tiny_model_dir: Path):
    command = [*SERVE, str(tiny_model_dir), *ARGUMENTS, "--kv-policy", "snapkv", "--kv-policy-config", '{"ratio":']
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **ENVIRONMENT}, timeout=180)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert "--kv-policy-config" in last and "JSON" in last and "Traceback" not in done.stderr
