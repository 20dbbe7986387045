"""The command `kvplug eval`, with engines and a server whose answers are known."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from serve_tools import add_tokenizer

from vllm_kvplug import cli
from vllm_kvplug.commands.evaluate import split
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.eval import runner
from vllm_kvplug.eval.fidelity import Continuation
from vllm_kvplug.eval.runner import Answers, Engines, Server, request_options, usage_in
from vllm_kvplug.eval.tasks import make


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_tokenizer(tiny_model_dir, tmp_path_factory.mktemp("eval") / "model")


def run(monkeypatch: pytest.MonkeyPatch, model: Path, out: Path, *flags: str) -> None:
    arguments = ["eval", str(model), "--tasks", "kv,drift", "--tokens", "1024", "--n", "3", "--out", str(out), *flags]
    monkeypatch.setattr("sys.argv", ["kvplug", *arguments])
    cli.main()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Labels of the runs that reach an engine. Full attention knows every answer, a policy those of one task."""
    labels: list[str] = []

    def answer(self: Any, policy: str, examples: Any, label: str) -> Answers:
        labels.append(label)
        return Answers([e.answer if policy == "full" or e.task == "kv" else "" for e in examples], 1 + len(policy))

    def continue_text(self: Any, policy: str, prompts: Any, tokens: int, label: str) -> list[Continuation]:
        labels.append(label)
        return [Continuation([1, int(policy == "full")], [{1: -0.1}, {2: -0.1}]) for _ in prompts]

    monkeypatch.setattr(Engines, "answer", answer)
    monkeypatch.setattr(Engines, "continue_text", continue_text)
    return labels


def test_runs_and_reruns(
    asked: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: Path,
    tmp_path: Path,
):
    run(monkeypatch, model, tmp_path, "--policies", "full,snapkv@0.5")
    assert asked == ["full 1024 tasks", "snapkv@0.5 1024 tasks"]
    shown = capsys.readouterr().out
    assert "| snapkv@0.5 | 1024 | kv | 1.000 | 1.000 |" in shown
    assert "| snapkv@0.5 | 1024 | mean | 0.500 | 0.500 |" in shown
    run(monkeypatch, model, tmp_path, "--policies", "full,snapkv@0.5,snapkv@0.3")
    assert asked[2:] == ["snapkv@0.3 1024 tasks"]
    with pytest.raises(SystemExit, match="another seed"):
        run(monkeypatch, model, tmp_path, "--policies", "full", "--seed", "1")


def test_multiquery(asked: list[str], monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path):
    """Engines hear of it, and its results do not mix with others."""
    told = []
    answer = Engines.answer

    def listen(self: Engines, *arguments: Any) -> Answers:
        told.append((self.multiquery, self.scores))
        return answer(self, *arguments)

    monkeypatch.setattr(Engines, "answer", listen)
    run(monkeypatch, model, tmp_path, "--policies", "full,snapkv@0.5", "--multiquery")
    assert told == [(True, tmp_path / "scores")] * 2
    with pytest.raises(SystemExit, match="another multiquery"):
        run(monkeypatch, model, tmp_path, "--policies", "full")


def test_fidelity(asked: list[str], monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path):
    """Full attention continues a text once for all policies; the second of two tokens differs."""
    text = tmp_path / "text.txt"
    text.write_text("the cache of a head keeps what its last queries read. " * 200)
    flags = ["--policies", "full,snapkv@0.5,snapkv@0.3", "--fidelity", str(text)]
    run(monkeypatch, model, tmp_path / "out", *flags)
    assert [label for label in asked if "fidelity" in label] == [
        f"{policy} 1024 fidelity text.txt" for policy in ("full", "snapkv@0.5", "snapkv@0.3")
    ]
    runs = json.loads((tmp_path / "out" / "results.json").read_text())["runs"]
    assert runs["snapkv@0.3 1024 fidelity text.txt"]["token_match"] == 0.5
    text.write_text("short")
    with pytest.raises(SystemExit, match="--fidelity"):
        run(monkeypatch, model, tmp_path / "other", *flags)


@pytest.mark.parametrize(
    "flags, named",
    [
        (["--policies", "nope"], "nope"),
        (["--policies", "full,streaming@0.5"], "streaming@0.5"),
        (["--policies", "full", "--tasks", "nope"], "--tasks nope"),
        (["--policies", "full", "--tokens", "1k"], "--tokens 1k"),
        (["--policies", "full", "--tokens", "50"], "--tokens 50"),
        (["--policies", 'snapkv:{"ratio": 0.5}', "--server", "http://localhost:1"], "running server"),
        (["--policies", "full", "--server", "http://localhost:1", "--fidelity", "x"], "--fidelity"),
        (["--policies", "full", "--server", "http://localhost:1"], "--server http://localhost:1"),
        (["--policies", "oracle@0.5", "--server", "http://localhost:1"], "oracle@0.5"),
        (["--policies", "full,oracle@0.5", "--fidelity", "x"], "oracle"),
    ],
    ids=str,
)
def test_refusals(
    flags: list[str], named: str, asked: list[str], monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
):
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, model, tmp_path, *flags)
    assert named in str(caught.value) and not asked


def test_commas_within_json():
    assert split('full, snapkv@0.5,streaming:{"window": 9, "sinks": 2}') == [
        "full",
        "snapkv@0.5",
        'streaming:{"window": 9, "sinks": 2}',
    ]


# ------------------------------------------------------------------------------------------ a real engine


ENGINE = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 4}


def test_an_engine(model: Path, monkeypatch: pytest.MonkeyPatch):
    """Half of the prompt's blocks, and log-probabilities of every decoded token."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    engines = Engines(str(model), ENGINE)
    prompts = [[i % 300 for i in range(n)] for n in (640, 320)]
    job = engines._run("snapkv", {"ratio": 0.5}, prompts, [8, 8], "test", 5)
    # 320 + 2 tokens of 642, and 160 + 2 of 322, in blocks of 16, until 7 of the 8 are there.
    seen = [(640 + n, 320 + n) for n in range(2, 8)]
    assert job["memory"] == pytest.approx((336 + 176) * len(seen) / sum(map(sum, seen)))
    assert [len(tokens) for tokens in job["tokens"]] == [8, 8]
    assert all(str(t) in step for t, step in zip(job["tokens"][0], job["steps"][0], strict=True))


def test_an_engine_that_fails(model: Path):
    with pytest.raises(PolicyError, match="some run: the engine failed"):
        Engines(str(model), {"dtype": "float33"})._run(None, {}, [[1]], [1], "some run")


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What would be asked of engines."""
    found: list[dict[str, Any]] = []

    def run(self: Any, name: Any, knobs: Any, prompts: Any, limits: Any, label: str, logprobs: int = 0, options=()):
        found.append({"name": name, "knobs": knobs, "prompts": prompts, "options": list(options), "label": label})
        return {"texts": [""] * len(prompts), "memory": 1.0, "tokens": [[5, 6]] * len(prompts)}

    monkeypatch.setattr(Engines, "_run", run)
    return found


@pytest.mark.parametrize("policy, cut", [("snapkv@0.5", True), ("full", False), ("streaming", False)])
def test_contexts_for_several_questions(policy: str, cut: bool, jobs: list[dict[str, Any]], model: Path):
    """All questions of a context have the same first tokens, where policies that can be told so cut it."""
    engines = Engines(str(model), multiquery=True)
    tokens = lambda text: len(engines.tokenizer(text, add_special_tokens=False)["input_ids"])  # noqa: E731
    engines.answer(policy, [make("multiquery", 600, 0, index, tokens) for index in range(2)], "test")
    (job,) = jobs
    if not cut:
        assert job["options"] == [{}, {}]
        return
    ends = [asked["kvplug.context_end"] for asked in job["options"]]
    first, other = (prompt[:end] for prompt, end in zip(job["prompts"], ends, strict=True))
    assert first == other and 400 < ends[0] < min(map(len, job["prompts"]))


def test_oracles_are_told(jobs: list[dict[str, Any]], model: Path, tmp_path: Path):
    """Scores are computed once for all budgets; a folder without them says how to get them."""
    engines = Engines(str(model), scores=tmp_path)
    examples = [make("kv", 300, 0, index, lambda text: len(engines.tokenizer(text)["input_ids"])) for index in range(2)]
    engines.answer("oracle@0.5", examples, "test")
    (job,) = jobs
    assert job["knobs"] == {"ratio": 0.5, "scores": str(tmp_path / "kvzip")}
    names = [asked["kvplug.scores"] for asked in job["options"]]
    assert sorted(f"{name}.safetensors" for name in names) == sorted(p.name for p in (tmp_path / "kvzip").iterdir())
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "kvzip").iterdir()}
    engines.answer("oracle@0.25", examples, "test")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "kvzip").iterdir()} == written
    engines.answer('oracle:{"scores": "answer"}', examples, "test")
    assert [job["label"] for job in jobs[2:]] == ["full attention's answers", "test"]
    assert len(list((tmp_path / "answer").iterdir())) == 2
    with pytest.raises(PolicyError, match='no scores for 2 of 2 prompts. Give "scores": "kvzip"'):
        engines.answer(f'oracle:{{"scores": "{tmp_path}"}}', examples, "test")


# ------------------------------------------------------------------------------------------ a server


class Echo(BaseHTTPRequestHandler):
    """An OpenAI server that answers with the options it was sent, and a cache that is 0.25 full."""

    def do_GET(self) -> None:
        if self.path == "/metrics":
            return self._send(b'vllm:kv_cache_usage_perc{engine="0"} 0.25\n')
        self._send(json.dumps({"object": "list", "data": [{"id": "served", "object": "model"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = json.dumps({"model": body["model"], "xargs": body.get("vllm_xargs")})
        choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        self._send(json.dumps({"id": "1", "object": "chat.completion", "created": 0, "choices": [choice]}).encode())

    def _send(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    "policy, options", [("full", {"kvplug.off": 1}), ("snapkv@0.5", {"kvplug.budget": 0.5}), ("snapkv", None)]
)
def test_a_server(policy: str, options: Any, url: str, model: Path):
    pytest.importorskip("openai")
    from transformers import AutoTokenizer

    examples = [make("kv", 4000, 0, i, len) for i in range(3)]  # characters in place of tokens
    server = Server(url, AutoTokenizer.from_pretrained(model))
    with runner.PeakUsage(f"{url}/metrics", seconds=0.01) as usage:
        while not usage.peak:
            pass
    assert usage.peak == 0.25
    answers = server.answer(policy, examples, "test")
    assert [json.loads(text) for text in answers.texts] == [{"model": "served", "xargs": options}] * 3
    assert request_options(policy) == (options or {})
    told = json.loads(replace(server, multiquery=True).answer(policy, examples, "test").texts[0])["xargs"]
    assert ("kvplug.context_end" in (told or {})) == (policy != "full")


def test_the_fullest_engine_counts():
    metrics = (
        '# HELP vllm:kv\nvllm:kv_cache_usage_perc{engine="0"} 0.1\nvllm:kv_cache_usage_perc{engine="1"} 0.3\nx 9\n'
    )
    assert usage_in(metrics) == 0.3 and usage_in("x 9\n") == 0
