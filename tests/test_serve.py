"""The real server over HTTP, under a policy: concurrent streams, a cancelled one, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("prometheus_client")

START_SECONDS = 300
MAX_LEN = 2048
BLOCKS = 160  # one is the null block; enough for one request of the maximum length
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # vLLM's defaults, which engines of other tests in this process have changed.
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
}
SERVE = [sys.executable, "-m", "vllm_kvplug.cli", "serve"]
ARGUMENTS = ["--dtype", "float32", "--enforce-eager", "--max-model-len", str(MAX_LEN)]
WORDS = "the cache of a head keeps what its last queries read and gives the rest of its pages back to others".split()


# ------------------------------------------------------------------------------------------------ server


@dataclass
class Server:
    """A running server, and the client of the test that is running."""

    name: str
    url: str
    log: Path
    client: Any = None

    def metrics(self) -> dict[str, float]:
        """Sum of every metric over its labels; `name{reason}` for finished requests by reason."""
        from prometheus_client.parser import text_string_to_metric_families

        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            text = response.read().decode()
        result: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                keys = [sample.name]
                if "finished_reason" in sample.labels:
                    keys.append(f"{sample.name}{{{sample.labels['finished_reason']}}}")
                for key in keys:
                    result[key] = result.get(key, 0) + sample.value
        return result

    def wait_idle(self) -> dict[str, float]:
        """Metrics once no request runs or waits."""
        for _ in range(100):
            metrics = self.metrics()
            if metrics["vllm:num_requests_running"] == metrics["vllm:num_requests_waiting"] == 0:
                return metrics
            time.sleep(0.2)
        raise AssertionError(f"requests are still running: {metrics['vllm:num_requests_running']}")

    async def complete(self, prompt: str, tokens: int, **options: Any) -> Any:
        """Greedy unless told otherwise, and past the end-of-text token."""
        request = {"model": "served", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        return await self.client.completions.create(**{**request, "extra_body": {"ignore_eos": True}, **options})

    async def stream(self, prompt: str, tokens: int) -> Any:
        return await self.complete(prompt, tokens, stream=True, stream_options={"include_usage": True})

    def run(self, work: Callable[[], Any]) -> Any:
        """Run the coroutine that `work` makes, with a client of its own."""

        async def with_client() -> Any:
            async with openai.AsyncOpenAI(
                base_url=f"{self.url}/v1", api_key="none", timeout=120, max_retries=0
            ) as client:
                self.client = client
                return await work()

        return asyncio.run(with_client())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server and whatever it started; it leads a session of its own."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
            process.wait(30)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            return


def wait_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        assert process.poll() is None, f"the server ended:\n{log.read_text()[-3000:]}"
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
                if response.status == 200:
                    return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"no health within {START_SECONDS} s:\n{log.read_text()[-3000:]}")


def add_tokenizer(model_dir: Path, folder: Path) -> Path:
    """A copy of the tiny model that can read and write text: bytes, a few merges, and an end-of-text token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    shutil.copytree(model_dir, folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = tokenizer.token_to_id("<|end|>")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", params=["tiny", "smollm2"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SnapKV at a quarter of the prompt; prompts are computed in chunks of up to 256 tokens."""
    folder = tmp_path_factory.mktemp("server")
    if request.param == "tiny":
        model = add_tokenizer(request.getfixturevalue("tiny_model_dir"), folder / "model")
    else:
        model = request.getfixturevalue("small_model_dir")
    port, log = free_port(), folder / "log"
    knobs = {"ratio": 0.25, "window": 16}
    command = [*SERVE, str(model), "--served-model-name", "served", "--host", "127.0.0.1", "--port", str(port)]
    command += [*ARGUMENTS, "--kv-policy", "snapkv", "--kv-policy-config", json.dumps(knobs)]
    # A model may write white space for ever where JSON allows it.
    command += ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']
    command += ["--max-num-seqs", "4", "--max-num-batched-tokens", "256", "--num-gpu-blocks-override", str(BLOCKS)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **ENVIRONMENT}, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_healthy(process, url, log)
        yield Server(request.param, url, log)
        assert process.poll() is None, f"the server died:\n{log.read_text()[-3000:]}"
    finally:
        stop(process)


def prompt_of(words: int, seed: int) -> str:
    return " ".join(WORDS[(seed + i * i) % len(WORDS)] for i in range(words))


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

    before = server.wait_idle()
    together, singly = server.run(work)
    after = server.wait_idle()
    stayed = [result for i, result in enumerate(together) if i != cancelled]
    for (text, usage), single in zip(stayed, singly, strict=True):
        assert text == single.choices[0].text
        assert usage.completion_tokens == single.usage.completion_tokens == tokens
        assert usage.prompt_tokens == single.usage.prompt_tokens
    assert together[cancelled][1] is None

    def added(name: str) -> float:
        return after.get(name, 0) - before.get(name, 0)

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
    tokens = 1500 if server.name == "tiny" else 60

    async def work() -> list[float]:
        answer = asyncio.create_task(server.complete(prompt_of(300, 4), tokens))
        shares = []
        while not answer.done():
            shares.append((await asyncio.to_thread(server.metrics))["vllm:kv_cache_usage_perc"])
            await asyncio.sleep(0.01)
        assert (await answer).usage.completion_tokens == tokens
        return shares

    most = 300 // 4 // 16 + tokens // 16 + 3
    shares = server.run(work)
    assert 0 < max(shares) * (BLOCKS - 1) <= max(most, 20)  # 19 while the prompt is computed
    assert server.wait_idle()["vllm:kv_cache_usage_perc"] == 0


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
