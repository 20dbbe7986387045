"""With a budget that covers the context, every policy gives stock vLLM's greedy tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine_tools import (
    TWO_PIVOTS,
    Ask,
    Case,
    greedy,
    heterocache,
    one_thread,  # noqa: F401
    random_keep,
    serve,
    snapkv,
    streaming,
    tiny_engine,
    token_ids,
)

LENGTHS = (1, 2, 5, 16, 17, 224, 256, 257, 513, 811, 1500)
STEPS = 20  # enough for every head to enter a new page
POOL = 241  # blocks, one of them vLLM's null block
STOCK_POOL = (POOL - 1) // 2 + 1
CASES = [streaming(4000), snapkv(1), random_keep(1), heterocache("two-pivots", TWO_PIVOTS, 1)]
CROWD = [token_ids(460, seed) for seed in range(8)]
CROWD_STEPS = 80  # 8 x 34 blocks at the end: more than the pool


@dataclass
class Tokens:
    """Greedy tokens of one engine, alone: [prompt]; at once: [prompt], two batches of eight; crowd: [prompt]."""

    alone: list[list[int]]
    at_once: list[list[list[int]]]
    crowd: list[list[int]]
    crowd_preemptions: int


def run(model_dir: Path, chunk: int, pool: int = POOL, **arguments: Any) -> Tokens:
    prompts = [token_ids(length) for length in LENGTHS]
    small = {"num_gpu_blocks_override": pool} if chunk == 256 else {}
    with tiny_engine(model_dir, max_num_batched_tokens=chunk, **small, **arguments) as llm:
        alone = [greedy(llm, [prompt], STEPS)[0] for prompt in prompts]
        at_once = [greedy(llm, batch, STEPS) for batch in (prompts[:8], prompts[-8:])]
        crowd = serve(llm, [Ask(prompt, CROWD_STEPS) for prompt in CROWD]) if small else []
    return Tokens(alone, at_once, [a.tokens for a in crowd], sum(a.preemptions for a in crowd))


@pytest.fixture(scope="module", params=[256, 2048], ids=["chunked", "whole"])
def chunk(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def stock(chunk: int, tiny_model_dir: Path) -> Tokens:
    return run(tiny_model_dir, chunk, STOCK_POOL, block_size=32)  # the smallest block that stock serves on a CPU


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def ours(
    request: pytest.FixtureRequest, chunk: int, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tokens]:
    case: Case = request.param
    yield run(tiny_model_dir, chunk, **case.arguments(tiny_model_dir, tmp_path_factory.mktemp("profiles")))


def test_one_request(stock: Tokens, ours: Tokens) -> None:
    assert dict(zip(LENGTHS, ours.alone, strict=True)) == dict(zip(LENGTHS, stock.alone, strict=True))


def test_eight_requests_at_once(stock: Tokens, ours: Tokens) -> None:
    for lengths, batch, expected in zip((LENGTHS[:8], LENGTHS[-8:]), ours.at_once, stock.at_once, strict=True):
        assert dict(zip(lengths, batch, strict=True)) == dict(zip(lengths, expected, strict=True))


def test_preempted_requests(chunk: int, stock: Tokens, ours: Tokens) -> None:
    if chunk != 256:
        pytest.skip("the small pool belongs to the chunked engine")
    assert stock.crowd_preemptions > 0 and ours.crowd_preemptions > 0, "nothing was preempted"
    assert ours.crowd == stock.crowd


def test_tokens_say_something(stock: Tokens) -> None:
    """A model that repeats itself would agree with anything."""
    assert all(len(set(tokens)) > STEPS // 3 for tokens in stock.alone)
