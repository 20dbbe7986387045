"""Per-request options over HTTP, refusals as status 400, and our metrics beside vLLM's, from a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from drift_tools import knobs, rule
from serve_tools import MAX_LEN, Server, add_tokenizer, prompt_of, serving

from benchmarks.drift_model import make_model, write_profile

openai = pytest.importorskip("openai")
pytest.importorskip("prometheus_client")

SLOT = 64 * 2 * 32 * 4  # bytes of a host slot: 64 tokens of one head in float32
SLOTS = 100  # six satellites: a request of up to 1024 tokens
LONGEST = SLOTS // 6 * 64
SYSTEM = "keep what the last queries read"
TOKENS = 44  # eight drift windows of five queries and a part of one
OURS = {
    "vllm:kvplug_drift_checks_total",
    "vllm:kvplug_drift_triggers_total",
    "vllm:kvplug_fetched_bytes_total",
    "vllm:kvplug_landings_total",
    "vllm:kvplug_late_landings_total",
    "vllm:kvplug_late_seconds_total",
    "vllm:kvplug_kept_ratio",
    "vllm:kvplug_host_used_bytes",
    "vllm:kvplug_host_total_bytes",
    "vllm:kvplug_refused_requests_total",
}
STOCK = {"vllm:kv_cache_usage_perc", "vllm:prompt_tokens_total", "vllm:generation_tokens_total"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """HeteroCache with retrieval, and a host tier for one request of half the maximum length."""
    folder = tmp_path_factory.mktemp("server")
    model = add_tokenizer(make_model(folder), folder / "model")
    config = knobs(write_profile(model, folder / "profile.json"), rule(), host_gib=SLOTS * SLOT / 2**30)
    flags = ["--kv-policy", "heterocache", "--kv-policy-config", json.dumps(config), "--max-num-seqs", "8"]
    with serving("drifting", model, folder, flags) as running:
        yield running


def text_of(answer: Any) -> str:
    assert answer.usage.completion_tokens == TOKENS
    return answer.choices[0].message.content


def test_the_log_says_what_is_protected_and_what_fits(server: Server) -> None:
    log = server.log.read_text()
    assert "System prompts are protected." in log
    assert f"Requests that may grow beyond {LONGEST} tokens will be refused" in log


# ------------------------------------------------------------------------------------------------- options


def test_every_option(server: Server) -> None:
    """Off and a budget of everything agree, whatever the form; other options are others."""
    text = prompt_of(300, 1)

    async def work() -> list[str]:
        asked: list[dict[str, Any]] = [{}, {"kvplug_budget": 0.8}, {"kvplug_protect": [100, 250]}]
        asked += [
            {"kvplug_protect": "[[100, 250]]"},
            {"kvplug_off": True},
            {"kvplug_off": "true"},
            {"kvplug_budget": "1"},
            {"kvplug_context_end": 200},
        ]
        return [text_of(await server.chat(text, TOKENS, SYSTEM, **options)) for options in asked]

    default, most, protected, again, off, also_off, whole, context = server.run(work)
    assert off == also_off == whole and protected == again
    assert len({default, most, protected, off, context}) == 5


def test_concurrent_streams(server: Server) -> None:
    """Each gets what it gets alone, though the host tier holds two of the five at a time."""
    asked: list[dict[str, Any]] = [{}, {"kvplug_budget": 0.7}, {"kvplug_protect": [30, 90]}, {"kvplug_off": 1}, {}]
    texts = [prompt_of(400, seed) for seed in range(len(asked))]

    async def stream(index: int) -> str:
        events = await server.chat(texts[index], TOKENS, SYSTEM, stream=True, **asked[index])
        return "".join([choice.delta.content or "" async for event in events for choice in event.choices])

    async def work() -> tuple[list[str], list[str]]:
        together = await asyncio.gather(*map(stream, range(len(asked))))
        alone = [text_of(await server.chat(t, TOKENS, SYSTEM, **o)) for t, o in zip(texts, asked, strict=True)]
        return together, alone

    before = server.wait_idle()
    together, alone = server.run(work)
    after = server.wait_idle()
    assert together == alone
    assert after["vllm:num_preemptions_total"] == before["vllm:num_preemptions_total"]


# ------------------------------------------------------------------------------------------------ refusals

BAD: list[tuple[dict[str, Any], str]] = [
    ({"budgets": 0.5}, "kvplug.budgets: no such option"),
    ({"budget": "half"}, "kvplug.budget must be a number"),
    ({"budget": 0}, "kvplug.budget must be above 0"),
    ({"budget": 1.5}, "kvplug.budget must be above 0 and at most 1"),
    ({"budget": 0.3}, "kvplug.budget 0.3: heterocache: rho=0.3 pays for"),
    ({"budget": [0.5]}, "kvplug.budget must be a number"),
    ({"off": "maybe"}, "kvplug.off must be true or false"),
    ({"off": 1, "budget": 0.6}, "kvplug.off keeps everything"),
    ({"protect": [5]}, "kvplug.protect must be token ranges"),
    ({"protect": [9, 3]}, "kvplug.protect must be token ranges"),
    ({"protect": "[0, Infinity]"}, "kvplug.protect must be token ranges"),
    ({"protect": [0, 1000]}, "kvplug.protect: the prompt has"),
    ({"context_end": 0}, "kvplug.context_end must be a number of tokens"),
    ({"context_end": 1000}, "kvplug.context_end: the prompt has"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_bad_options_are_status_400(server: Server, stream: bool) -> None:
    """With the reason, before a stream begins, in chats and completions; each is counted, and harms no other."""
    text = prompt_of(60, 2)

    async def refused(options: dict[str, Any]) -> None:
        ours = {f"kvplug_{name}": value for name, value in options.items()}
        await server.chat(text, 4, stream=stream, **ours)

    async def work() -> list[Any]:
        other = asyncio.create_task(server.chat(prompt_of(300, 3), TOKENS))
        found = await asyncio.gather(*[refused(options) for options, _ in BAD], return_exceptions=True)
        body = {"vllm_xargs": {"kvplug.budget": 7}}
        found += await asyncio.gather(server.complete(text, 4, stream=stream, extra_body=body), return_exceptions=True)
        text_of(await other)
        return found

    before = server.wait_idle()
    found = server.run(work)
    for error, words in zip(found, [*(words for _, words in BAD), "kvplug.budget must be"], strict=True):
        assert isinstance(error, openai.BadRequestError), error
        assert words in error.body["message"] and error.body["code"] == error.status_code == 400
    after = server.wait_idle()
    name = "vllm:kvplug_refused_requests_total"
    assert after[name] - before[name] == len(found)


def test_nested_ranges_are_not_for_http(server: Server) -> None:
    """vLLM takes flat lists; it says so itself, and names the option."""
    with pytest.raises(openai.BadRequestError) as caught:
        server.run(lambda: server.chat("hello", 4, kvplug_protect=[[0, 2]]))
    assert "kvplug.protect" in str(caught.value)


@pytest.mark.parametrize("stream", [False, True])
def test_what_never_fits_the_host_tier_is_status_400(server: Server, stream: bool) -> None:
    async def work(text: str, tokens: int, **options: Any) -> Any:
        return await server.chat(text, tokens, stream=stream, **options)

    for text, tokens in ((prompt_of(1000, 4), 100), (prompt_of(100, 4), MAX_LEN - 300)):
        with pytest.raises(openai.BadRequestError) as caught:
            server.run(lambda text=text, tokens=tokens: work(text, tokens))
        assert "host_gib=" in caught.value.body["message"] and caught.value.status_code == 400
    if not stream:
        answer = server.run(lambda: work(prompt_of(1000, 4), TOKENS, kvplug_off=1))
        assert answer.usage.prompt_tokens + TOKENS > LONGEST


# ------------------------------------------------------------------------------------------------- metrics


def test_metrics_while_a_request_decodes(server: Server) -> None:
    host, kept, tokens = "vllm:kvplug_host_used_bytes", "vllm:kvplug_kept_ratio", 600

    async def work() -> tuple[list[dict[str, float]], int]:
        return await server.metrics_during(lambda: server.chat(prompt_of(350, 5), tokens), kept)

    server.run(lambda: server.chat(prompt_of(10, 1), 1))  # the first step tells how large the host tier is
    before = server.wait_idle()
    seen, made = server.run(work)
    after = server.wait_idle()
    for metrics in (before, after, *seen):
        assert metrics.keys() >= OURS | STOCK
        assert metrics["vllm:kvplug_host_total_bytes"] == SLOTS * SLOT
    for metrics in (before, after):
        assert metrics[host] == metrics[kept] == 0
    assert {m[host] for m in seen} <= {0, 36 * SLOT}
    decoding = [m[kept] for m in seen if m[kept]]
    assert any(m[host] for m in seen) and decoding == pytest.approx([0.6] * len(decoding), abs=0.002)

    added = {name: after[name] - before[name] for name in OURS}
    assert added["vllm:kvplug_drift_checks_total"] == made * ((tokens - 1) // 5)
    triggers, landings = added["vllm:kvplug_drift_triggers_total"], added["vllm:kvplug_landings_total"]
    assert 0 < triggers < 3 * added["vllm:kvplug_drift_checks_total"]
    assert triggers - 3 * made <= landings <= triggers  # what is on its way at the end never lands
    assert 0 <= added["vllm:kvplug_late_landings_total"] <= landings
    assert added["vllm:kvplug_fetched_bytes_total"] % 256 == 0
    assert triggers * 256 < added["vllm:kvplug_fetched_bytes_total"] < triggers * 2 * 350 * 256
    assert added["vllm:kvplug_refused_requests_total"] == 0


def test_a_cancelled_request_leaves_nothing(server: Server) -> None:
    host = "vllm:kvplug_host_used_bytes"

    async def cancelled() -> None:
        events = await server.chat(prompt_of(350, 6), 500, stream=True)
        async for _ in events:
            await asyncio.sleep(0.5)
            await events.close()
            return

    server.run(lambda: server.metrics_during(cancelled, host))
    metrics = server.wait_idle()
    assert metrics[host] == metrics["vllm:kvplug_kept_ratio"] == 0
    assert metrics["vllm:kv_cache_usage_perc"] == 0
    assert "Traceback" not in server.log.read_text()
