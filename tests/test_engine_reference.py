"""A compressing engine keeps the reference's tokens in every head and gives its distributions, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
from cases import (
    TWO_PIVOTS,
    VOLATILE,
    Case,
    duo,
    expected_attention,
    fastkvzip,
    heterocache,
    knorm,
    random_keep,
    snapkv,
    streaming,
)
from engine_tools import (
    Answer,
    Ask,
    Pinned,
    Snapshot,
    Watch,
    check_kept,
    check_logprobs,
    equal_up_to_ties,
    one_thread,  # noqa: F401
    serve,
    tiny_engine,
    token_ids,
)
from reference import Reference, Replay

# Shorter than a window of 64 and around it; ends that a border of 256 cuts from their window; several chunks.
LENGTHS = (1, 5, 20, 63, 64, 65, 69, 257, 260, 300, 320, 511, 513)
STEPS = 18  # every head enters a new page
CASES = [
    streaming(64),
    snapkv(0.5),
    snapkv(0.3),
    random_keep(0.4),
    duo(0.5),
    expected_attention(0.4),
    expected_attention(0.3, window=100),
    snapkv(0.3, "layer"),
    expected_attention(0.4, allocation="layer"),
    heterocache("two-pivots", TWO_PIVOTS, 0.6),
    heterocache("volatile", VOLATILE, 0.7, window=24),
    knorm(0.5, 16, 64),
    knorm(0.3, 64, 2048),
    fastkvzip(0.4, 40, 128),
    fastkvzip(0.3, 4096, 16_000, 0.05),
]


@dataclass
class Ran:
    """Requests of one engine by (way, length): 'alone' one after another, 'mixed' all in the same batches."""

    case: Case
    answers: dict[tuple[str, int], Answer] = field(default_factory=dict)
    snapshots: dict[tuple[str, int], list[Snapshot]] = field(default_factory=dict)
    widest: int = 0


@pytest.fixture(
    scope="module",
    params=[(case, chunk) for case in CASES for chunk in (256, 2048)],
    ids=lambda p: f"{p[0].name}-chunks-{p[1]}",
)
def ran(request: pytest.FixtureRequest, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    case, chunk = request.param
    result = Ran(case)
    arguments = case.arguments(tiny_model_dir, tmp_path_factory.mktemp("profiles"))
    with tiny_engine(tiny_model_dir, max_num_batched_tokens=chunk, **arguments) as llm:
        watch = Watch(llm)
        everything = {"logprobs": -1}
        # In the mixed run requests come in while others decode, and more of them than run at once.
        waves = [("alone", [Ask(token_ids(n), STEPS, sampling=everything)], (n,)) for n in LENGTHS]
        crowd = [Ask(token_ids(n), STEPS, arrives=i, sampling=everything) for i, n in enumerate(LENGTHS)]
        for way, asks, lengths in [*waves, ("mixed", crowd, LENGTHS)]:
            watch.clear()
            for length, answer in zip(lengths, serve(llm, asks), strict=True):
                result.answers[way, length] = answer
                result.snapshots[way, length] = watch.snapshots[answer.request_id]
    return result


@pytest.fixture(scope="module")
def reference(tiny_model_dir: Path) -> Reference:
    return Reference(tiny_model_dir)


@pytest.fixture(scope="module")
def replay_of(reference: Reference):
    """A case may be replayed for several engines: Replays by (rule, length)."""
    rules = {case.name: case.rule for case in CASES}
    return cache(lambda name, length: reference.replay(token_ids(length), rules[name], STEPS))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("way", ["alone", "mixed"])
def test_kept_positions(ran: Ran, replay_of, way: str, length: int) -> None:
    check_kept(ran.case.rule, replay_of(ran.case.name, length), ran.snapshots[way, length])


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("way", ["alone", "mixed"])
def test_logprobs(ran: Ran, reference: Reference, replay_of, way: str, length: int) -> None:
    replay: Replay = replay_of(ran.case.name, length)
    kept = next(s.kept for s in ran.snapshots[way, length] if s.length == length)
    if not equal_up_to_ties(kept, replay):
        replay = reference.replay(token_ids(length), Pinned(kept), STEPS)
    check_logprobs(ran.answers[way, length], replay)


def test_batches_were_mixed(ran: Ran) -> None:
    """The runs say nothing if a chunk of one token never came up, or everything was kept anyway."""
    kept = ran.snapshots["mixed", 513][-1].kept
    assert any(len(head) < 513 for layer in kept for head in layer)
    alone = [s.length for s in ran.snapshots["alone", 257] if s.length <= 257]
    assert alone in ([256, 257], [257], [64, 128, 192, 256, 257], [128, 256, 257])
