"""Where answers come from: engines of this machine, one after another, or a running server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_kvplug import compat
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.eval.fidelity import TOP, Continuation
from vllm_kvplug.eval.prompts import WITHOUT_CONTEXT_END, chat_ids, context_tokens
from vllm_kvplug.eval.tasks import Example
from vllm_kvplug.policies.argument import read_policy
from vllm_kvplug.policies.oracle import Oracle, scores_name

FULL = "full"
"""The run that others are compared with: full attention."""

USAGE = "vllm:kv_cache_usage_perc"


@dataclass(frozen=True)
class Answers:
    """Texts in the order of the examples, and the memory that requests took, in a unit of the backend."""

    texts: list[str]
    memory: float


def longest_answer(tokenizer: Any, example: Example) -> int:
    """Tokens that an answer may have: room for one that is laid out otherwise."""
    return int(len(tokenizer(example.answer)["input_ids"]) * 1.25) + 16


@dataclass
class Engines:
    """Engines of stock vLLM and of policies. memory: of blocks held while requests decode, per token.

    multiquery: contexts are cut before their questions are seen. scores: folder for what `oracle` is told, a folder of
    its own for every kind.
    """

    model: str
    arguments: dict[str, Any] = field(default_factory=dict)
    multiquery: bool = False
    scores: Path = Path("scores")

    def __post_init__(self) -> None:
        from transformers import AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(self.model)

    def answer(self, policy: str, examples: Sequence[Example], label: str) -> Answers:
        prompts = [chat_ids(self.tokenizer, e.messages) for e in examples]
        ends = [context_tokens(self.tokenizer, e.messages, e.context_end) for e in examples] if self.multiquery else []
        limits = [longest_answer(self.tokenizer, e) for e in examples]
        name, knobs = (None, {}) if policy == FULL else read_policy(policy)
        options: list[dict[str, Any]] = [{} for _ in prompts]
        if name is not None and name not in WITHOUT_CONTEXT_END:
            for asked, end in zip(options, ends, strict=False):
                asked["kvplug.context_end"] = end
        if name == Oracle.name:
            cuts = ends or [len(prompt) for prompt in prompts]
            knobs["scores"] = str(self._oracle_scores(policy, knobs.get("scores"), prompts, cuts, limits))
            for asked, prompt in zip(options, prompts, strict=True):
                asked["kvplug.scores"] = scores_name(prompt)
        result = self._run(name, knobs, prompts, limits, label, options=options)
        return Answers(result["texts"], result["memory"])

    def continue_text(self, policy: str, prompts: list[list[int]], tokens: int, label: str) -> list[Continuation]:
        """Greedy continuations of `tokens` tokens, with log-probabilities."""
        name, knobs = (None, {}) if policy == FULL else read_policy(policy)
        result = self._run(name, knobs, prompts, [tokens] * len(prompts), label, logprobs=TOP)
        steps = [[{int(t): p for t, p in step.items()} for step in steps] for steps in result["steps"]]
        return [Continuation(*pair) for pair in zip(result["tokens"], steps, strict=True)]

    def _oracle_scores(
        self, policy: str, given: str | None, prompts: list[list[int]], cuts: list[int], limits: list[int]
    ) -> Path:
        """Folder with scores of all prompts: one that was given, or one of a kind, which is filled here."""
        import torch

        from vllm_kvplug.eval.oracle import KINDS, Prompt, unscored, write_scores

        kind = next((kind for kind in KINDS if kind == (given or KINDS[0])), None)
        folder = Path(given or "") if kind is None else self.scores / kind
        missing = unscored(folder, prompts)
        if kind is None and missing:
            raise PolicyError(
                f"--policies {policy}: {folder} has no scores for {len(missing)} of {len(prompts)} prompts. Give "
                f'"scores": "{KINDS[0]}" or "{KINDS[1]}", and they are computed.'
            )
        if kind is not None and missing:
            asked = [prompts[i] for i in missing]
            answers: list[list[int]] = [[] for _ in asked]
            if kind == "answer":
                label = "full attention's answers"
                answers = self._run(None, {}, asked, [limits[i] for i in missing], label)["tokens"]
            todo = [Prompt(prompts[i], cuts[i], tuple(answer)) for i, answer in zip(missing, answers, strict=True)]
            device = "cuda" if torch.cuda.is_available() else "cpu"
            write_scores(self.model, self.tokenizer, kind, todo, folder, device)
            if device == "cuda":
                torch.cuda.empty_cache()  # for the next engine
        return folder

    def _run(
        self,
        name: str | None,
        knobs: dict[str, Any],
        prompts: list[list[int]],
        max_tokens: list[int],
        label: str,
        logprobs: int = 0,
        options: Sequence[dict[str, Any]] = (),
    ) -> Any:
        """What `engine_process` says of these prompts under a policy, None for stock vLLM."""
        longest = max(len(prompt) + most for prompt, most in zip(prompts, max_tokens, strict=True))
        engine = {"model": self.model, "max_model_len": longest, "enable_prefix_caching": False, **self.arguments}
        if name is not None:
            engine |= {"kv_policy": name, "kv_policy_config": knobs}
        job = {"engine": engine, "prompts": prompts, "max_tokens": max_tokens, "label": label, "logprobs": logprobs}
        job["options"] = list(options)
        with tempfile.TemporaryDirectory() as scratch:
            asked, out = Path(scratch) / "job.json", Path(scratch) / "out.json"
            asked.write_text(json.dumps(job))
            command = [sys.executable, "-m", "vllm_kvplug.eval.engine_process", str(asked), str(out)]
            status = subprocess.run(command, env={**os.environ, **compat.IN_PROCESS}).returncode
            if status:
                raise PolicyError(f"{label}: the engine failed with exit status {status}; what it said is above")
            return json.loads(out.read_text())


@dataclass
class Server:
    """A running server with one policy, of which requests may ask for another budget or none.

    memory: peak of vllm:kv_cache_usage_perc while the examples were answered, `at_once` at a time. multiquery: contexts
    are cut before their questions are seen.
    """

    url: str
    tokenizer: Any
    multiquery: bool = False
    at_once: int = 8

    def __post_init__(self) -> None:
        try:
            import openai
        except ImportError:
            raise PolicyError("--server needs the client: pip install openai") from None
        self._client = openai.OpenAI(base_url=f"{self.url.rstrip('/')}/v1", api_key="none", max_retries=2)
        try:
            self._model = self._client.models.list().data[0].id
        except openai.OpenAIError as error:
            raise PolicyError(f"--server {self.url} does not answer: {error}") from None

    def answer(self, policy: str, examples: Sequence[Example], label: str) -> Answers:
        from tqdm import tqdm

        common = request_options(policy)
        cut = self.multiquery and policy != FULL and read_policy(policy)[0] not in WITHOUT_CONTEXT_END

        def ask(example: Example) -> str:
            options = dict(common)
            if cut:
                options["kvplug.context_end"] = context_tokens(self.tokenizer, example.messages, example.context_end)
            reply = self._client.chat.completions.create(
                model=self._model,
                messages=example.messages,  # type: ignore[arg-type]
                temperature=0,
                max_tokens=longest_answer(self.tokenizer, example),
                extra_body={"vllm_xargs": options} if options else {},
            )
            return reply.choices[0].message.content or ""

        with PeakUsage(f"{self.url.rstrip('/')}/metrics") as usage, ThreadPoolExecutor(self.at_once) as pool:
            texts = list(tqdm(pool.map(ask, examples), total=len(examples), desc=label))
        return Answers(texts, usage.peak)


def is_oracle(policy: str) -> bool:
    return policy != FULL and read_policy(policy)[0] == Oracle.name


def request_options(policy: str) -> dict[str, Any]:
    """What a request to a server sends for a run: nothing for NAME, a budget for NAME@X, kvplug.off for full."""
    if policy == FULL:
        return {"kvplug.off": 1}
    name, knobs = read_policy(policy)
    if name == Oracle.name:
        raise PolicyError(f"--policies {policy}: its scores are made for engines of this machine: remove --server")
    if ":" in policy:
        raise PolicyError(f"--policies {policy}: a running server keeps its knobs; give {name} or {name}@X")
    return {"kvplug.budget": next(iter(knobs.values()))} if knobs else {}


class PeakUsage:
    """Looks at a server's cache usage until the end of the block."""

    def __init__(self, url: str, seconds: float = 0.1):
        self.url, self.seconds, self.peak = url, seconds, 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakUsage:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(self.seconds):
            try:
                with urllib.request.urlopen(self.url, timeout=5) as response:
                    self.peak = max(self.peak, usage_in(response.read().decode()))
            except OSError:
                continue


def usage_in(metrics: str) -> float:
    """The largest cache usage of a server's engines."""
    lines = [line for line in metrics.splitlines() if line.startswith(USAGE)]
    return max((float(line.rsplit(" ", 1)[1]) for line in lines), default=0.0)
