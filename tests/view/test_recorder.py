"""What is recorded of a real engine: what the plan promised, what the worker counted, what the pool held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import fastkvzip_yakv
from drift_tools import knobs, rule
from engine_tools import (
    counting,
    one_thread,  # noqa: F401
    runtime,
    tiny_engine,
    token_ids,
)

from benchmarks.drift_model import PROFILE, make_model, write_profile
from vllm_kvplug.options import RequestOptions
from vllm_kvplug.view.record import Record
from vllm_kvplug.view.recorder import ENGINE, record, token_texts

TOKENS, STEPS = 300, 21  # two prompt chunks


def run(llm: Any, prompt: list[int], max_tokens: int = STEPS, **options: Any) -> Record:
    def names(ids: Any) -> list[str]:
        return [f"<{token}>" for token in ids]

    return record(llm, {}, prompt, max_tokens, names, ignore_eos=True, detokenize=False, **options)


@pytest.fixture(scope="module")
def snapkv(tiny_model_dir: Path) -> Any:
    """Records by name, and the policy."""
    policy = {"kv_policy": "snapkv", "kv_policy_config": {"ratio": 0.3}}
    with tiny_engine(tiny_model_dir, **ENGINE, **policy) as llm:
        prompt = token_ids(TOKENS)
        protected = {"extra_args": {"kvplug.protect": [100, 250]}}
        found = {
            "plain": run(llm, prompt),
            "one token": run(llm, prompt, 1),
            "short": run(llm, prompt[:5]),
            "protected": run(llm, prompt, **protected),
        }
        return found, runtime(llm).policy


@pytest.mark.parametrize("case, tokens", [("plain", TOKENS), ("one token", TOKENS), ("short", 5)])
def test_kept_is_the_plans(snapkv: Any, case: str, tokens: int):
    found, policy = snapkv
    assert found[case].counts() == [list(layer) for layer in policy.plan().kept(tokens)]
    assert found[case].tokens == tokens
    assert found[case].share() == pytest.approx(0.3 if tokens == TOKENS else 1 / 5)


def test_protected_tokens_are_kept(snapkv: Any):
    found, policy = snapkv
    kept = policy.for_request(RequestOptions(protect=((100, 250),))).plan().kept(TOKENS)
    assert found["protected"].counts() == [list(layer) for layer in kept]
    assert all(votes == found["protected"].heads for votes in found["protected"].votes()[100:250])


def test_blocks_are_the_plans(snapkv: Any):
    """The whole prompt until the step after it, then what the plan allows at that length."""
    found, policy = snapkv
    steps, plan = found["plain"].steps, policy.plan()
    assert [step.tokens for step in steps] == [256, 300, *range(301, 300 + STEPS - 1)]
    assert [step.blocks for step in steps[:2]] == [plan.prefill_blocks(256), plan.prefill_blocks(300)]
    assert [s.blocks for s in steps[2:]] == [plan.decode_blocks(300, s.tokens) for s in steps[2:]]
    assert found["one token"].steps == steps[:1]


def test_the_rest_of_a_record(snapkv: Any):
    plain = snapkv[0]["plain"]
    assert plain.prompt == tuple(f"<{token}>" for token in token_ids(TOKENS)) and len(plain.answer) == STEPS
    assert plain.policy == "snapkv" and "ratio=0.3" in plain.summary and plain.roles is None
    assert (plain.checks, plain.drifts, plain.clusters) == (0, (), ())
    assert plain.pool.block_bytes == 3 * 2 * 16 * 2 * 32 * 4 and plain.pool.blocks > 100
    assert plain.versions.keys() == {"vllm_kvplug", "vllm", "torch", "device", "dtype"}
    assert Record.model_validate_json(plain.model_dump_json()) == plain


def test_a_ring(tiny_model_dir: Path):
    policy = {"kv_policy": "streaming", "kv_policy_config": {"sinks": 4, "window": 60}}
    with tiny_engine(tiny_model_dir, **ENGINE, **policy) as llm:
        found = run(llm, token_ids(TOKENS))
    assert found.kept == ((((0, 4), (240, 300)),) * 2,) * 3


def test_heads_that_share_a_budget(tiny_model_dir: Path):
    """Which head keeps how many is the data's choice; that they keep it together is the plan's."""
    policy = {"kv_policy": "knorm", "kv_policy_config": {"ratio": 0.4, "window": 32, "cut_every": 128}}
    with tiny_engine(tiny_model_dir, **ENGINE, **policy) as llm:
        found = run(llm, token_ids(TOKENS))
        plan = runtime(llm).policy.plan()
    assert sum(found.votes()) == plan.kept_tokens(TOKENS)
    assert found.votes()[-32:] == [6] * 32
    assert len({count for layer in found.counts() for count in layer}) > 1


@pytest.mark.parametrize("land_after", [1, 4])
def test_drift(tmp_path: Path, land_after: int):
    model = make_model(tmp_path)
    settings = knobs(write_profile(model, tmp_path / "profile.json"), rule(land_after=land_after))
    with tiny_engine(model, **ENGINE, kv_policy="heterocache", kv_policy_config=settings) as llm:
        counts = counting(llm)
        found = run(llm, token_ids(TOKENS), 43)
        counts.update(runtime(llm).take_counts())
        clusters = runtime(llm).policy.retrieval.clusters
    assert found.roles == tuple(map(tuple, PROFILE["roles"]))
    assert found.triggers == counts["triggers"] > 0 and found.checks == counts["checks"] == 8
    assert all(d.checked % 5 == 0 and d.lands == d.checked + land_after for d in found.drifts)
    landed = sum(len(d.clusters) for d in found.drifts if d.lands <= len(found.answer) - 1)
    assert landed == counts["landings"]
    assert [(c.layer, c.pivot, c.satellites) for c in found.clusters] == [
        (c.layer, c.pivot, c.satellites) for c in clusters
    ]
    used = [found.clusters[place].tokens for drift in found.drifts for place in drift.clusters]
    assert sum(used) * 2 * 32 * 4 == counts["fetched_bytes"]


def test_texts_of_tokens():
    class Tokenizer:
        """Drops a space at the beginning, and knows a letter that takes two tokens."""

        words = {1: " a", 2: " b", 3: "c", 4: "\ufffd", 5: "\ufffd"}

        def decode(self, ids: Any, **_: Any) -> str:
            text = "".join(self.words[i] for i in ids).replace("\ufffd\ufffd", "é")
            return text.removeprefix(" ")

    assert token_texts(Tokenizer(), [1, 2, 3, 1]) == ["a", " b", "c", " a"]
    assert token_texts(Tokenizer(), [4, 5]) == ["\ufffd", "é"]
    assert token_texts(Tokenizer(), []) == []


def test_what_lies_on_the_host_is_not_shown(tiny_model_dir: Path, tmp_path: Path):
    """Page tables name selected tokens by their numbers there; what is shown has stayed."""
    case = fastkvzip_yakv(0.2, 0.5, 20, 128, fetch=0.1)
    with tiny_engine(tiny_model_dir, **ENGINE, **case.arguments(tiny_model_dir, tmp_path)) as llm:
        found, plan = run(llm, token_ids(TOKENS)), runtime(llm).policy.plan()
    selected = plan.layout(TOKENS).selected * len(found.kept) * len(found.kept[0])
    assert selected and sum(map(sum, found.counts())) == plan.kept_tokens(TOKENS) - selected
    assert all(spans[-1][1] == TOKENS for layer in found.kept for spans in layer)
