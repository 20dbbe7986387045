"""The real server as a process of its own, for tests over HTTP, and a model that can read and write text."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

START_SECONDS = 300
ATTEMPTS = 20
MAX_LEN = 2048
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
CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
WORDS = "the cache of a head keeps what its last queries read and gives the rest of its pages back to others".split()


@dataclass
class Server:
    """A running server, and the client of the test that is running."""

    name: str
    url: str
    log: Path
    process: int
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

    async def metrics_during(self, request: Callable[[], Any], gauge: str) -> tuple[list[dict[str, float]], int]:
        """Metrics at moments of a request and a little before and after it, and how often it was made.

        It is made until `gauge` was seen above zero: on a busy machine this process may sleep through a request. The
        engine stands still for each look: vLLM's front end answers nobody else while the engine has steps for it.
        """
        engine = psutil.Process(self.process).children(recursive=True)
        assert engine, "no process of the engine was found"
        seen: list[dict[str, float]] = []
        for made in range(1, ATTEMPTS + 1):
            answer = asyncio.create_task(request())
            while not answer.done():
                await asyncio.sleep(0.1)
                for process in engine:
                    process.suspend()
                try:
                    seen.append(await asyncio.to_thread(self.metrics))
                finally:
                    for process in engine:
                        process.resume()
            await answer
            if any(metrics[gauge] for metrics in seen):
                return seen, made
        raise AssertionError(f"{gauge} was 0 whenever it was looked at")

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

    async def chat(self, text: str, tokens: int, system: str | None = None, **options: Any) -> Any:
        """Likewise, to a user's message. Options of ours are those that begin with kvplug."""
        ours = {f"kvplug.{name[7:]}": options.pop(name) for name in list(options) if name.startswith("kvplug_")}
        said = [] if system is None else [{"role": "system", "content": system}]
        return await self.client.chat.completions.create(
            model="served",
            messages=[*said, {"role": "user", "content": text}],
            max_tokens=tokens,
            temperature=0,
            extra_body={"ignore_eos": True, "vllm_xargs": ours},
            **options,
        )

    async def stream(self, prompt: str, tokens: int) -> Any:
        return await self.complete(prompt, tokens, stream=True, stream_options={"include_usage": True})

    def run(self, work: Callable[[], Any]) -> Any:
        """Run the coroutine that `work` makes, with a client of its own."""
        import openai

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


@contextmanager
def serving(name: str, model: Path, folder: Path, flags: Sequence[str]) -> Iterator[Server]:
    """A server of `model` with `flags`, until the end of the block; it must live as long."""
    port, log = free_port(), folder / "log"
    command = [*SERVE, str(model), "--served-model-name", "served", "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, *ARGUMENTS, *flags],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_healthy(process, url, log)
        yield Server(name, url, log, process.pid)
        assert process.poll() is None, f"the server died:\n{log.read_text()[-3000:]}"
    finally:
        stop(process)


def add_tokenizer(model_dir: Path, folder: Path) -> Path:
    """A copy of a tiny model that can read and write text: bytes, a few merges, and markers around a chat's turns."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    shutil.copytree(model_dir, folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    markers = ["<|end|>", "<|start|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=markers, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        extra_special_tokens={"start_token": "<|start|>"},
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = tokenizer.token_to_id("<|end|>")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def prompt_of(words: int, seed: int) -> str:
    return " ".join(WORDS[(seed + i * i) % len(WORDS)] for i in range(words))
