"""With a budget that covers the context, every policy gives stock vLLM's greedy tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cases import (
    TWO_PIVOTS,
    duo,
    expected_attention,
    fastkvzip,
    fastkvzip_yakv,
    heterocache,
    knorm,
    oracle,
    quest,
    random_keep,
    rkv,
    snapkv,
    streaming,
    yakv,
)
from engine_tools import (
    Ask,
    greedy,
    one_thread,  # noqa: F401
    serve,
    tiny_engine,
    token_ids,
)

LENGTHS = (1, 2, 5, 16, 17, 224, 256, 257, 513, 811, 1500)
CHUNKS = (256, 2048)
STEPS = 20  # enough for every head to enter a new page
POOL = 241  # blocks, one of them vLLM's null block
STOCK_POOL = (POOL - 1) // 2 + 1
CASES = [
    streaming(4000),
    snapkv(1),
    random_keep(1),
    duo(1),
    expected_attention(1),
    snapkv(1, "layer"),
    knorm(1, 16, 100),
    fastkvzip(1, 16, 100),
    knorm(1, 16, 100, "uniform"),
    fastkvzip(1, 16, 100, allocation="layer"),
    heterocache("two-pivots", TWO_PIVOTS, 1),
    oracle(),
    rkv(1600),
    yakv(),
    fastkvzip_yakv(1, 0.4, 16, 100, codec="auto"),
    quest(),
]
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
    limits = {"max_num_batched_tokens": chunk, "num_gpu_blocks_override": pool}
    with tiny_engine(model_dir, **limits, **arguments) as llm:
        alone = [greedy(llm, [prompt], STEPS)[0] for prompt in prompts]
        at_once = [greedy(llm, batch, STEPS) for batch in (prompts[:8], prompts[-8:])]
        crowd = serve(llm, [Ask(prompt, CROWD_STEPS) for prompt in CROWD])
    return Tokens(alone, at_once, [a.tokens for a in crowd], sum(a.preemptions for a in crowd))


@dataclass
class Runs:
    """A policy's engine, and stock's with chunks of the same size."""

    ours: Tokens
    stock: Tokens


@pytest.fixture(scope="module")
def stock_of(tiny_model_dir: Path) -> Callable[[int], Tokens]:
    """Tokens of a stock engine by chunk size, with the smallest blocks that it serves on a CPU."""
    return cache(lambda chunk: run(tiny_model_dir, chunk, STOCK_POOL, block_size=32))


@pytest.fixture(scope="module", params=itertools.product(CASES, CHUNKS), ids=lambda p: f"{p[0].name}-chunks-{p[1]}")
def runs(
    request: pytest.FixtureRequest,
    stock_of: Callable[[int], Tokens],
    tiny_model_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Runs:
    case, chunk = request.param
    arguments = case.arguments(tiny_model_dir, tmp_path_factory.mktemp("profiles"))
    return Runs(run(tiny_model_dir, chunk, **arguments), stock_of(chunk))


def test_one_request(runs: Runs) -> None:
    assert dict(zip(LENGTHS, runs.ours.alone, strict=True)) == dict(zip(LENGTHS, runs.stock.alone, strict=True))


def test_eight_requests_at_once(runs: Runs) -> None:
    batches = zip((LENGTHS[:8], LENGTHS[-8:]), runs.ours.at_once, runs.stock.at_once, strict=True)
    for lengths, ours, stock in batches:
        assert dict(zip(lengths, ours, strict=True)) == dict(zip(lengths, stock, strict=True))


def test_preempted_requests(runs: Runs) -> None:
    assert runs.stock.crowd_preemptions > 0 and runs.ours.crowd_preemptions > 0, "nothing was preempted"
    assert runs.ours.crowd == runs.stock.crowd


@pytest.mark.parametrize("chunk", CHUNKS)
def test_tokens_say_something(chunk: int, stock_of: Callable[[int], Tokens]) -> None:
    """A model that repeats itself would agree with anything."""
    assert all(len(set(tokens)) > STEPS // 3 for tokens in stock_of(chunk).alone)
