"""Policies by name: the built-in ones, and a third party's by entry point."""

from __future__ import annotations

import json
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_tools import kept_tokens
from test_config import SHAPE, error_of, save_profile

from vllm_kvplug import cli
from vllm_kvplug.calibrate.profile import ProfiledModel
from vllm_kvplug.config import PolicyConfig
from vllm_kvplug.gates.files import GateMetadata, SinkGateShape, WriteGateShape, save_gate
from vllm_kvplug.gates.sink_gate import SinkGate
from vllm_kvplug.gates.write_gate import WriteGate
from vllm_kvplug.policies.base import Policy, PromptView
from vllm_kvplug.policies.registry import BUILT_IN, make_policy, policy_class, policy_from_json, policy_names
from vllm_kvplug.policies.snapkv import SnapKV
from vllm_kvplug.shape import ModelShape

TP_SHAPE = ModelShape(
    layers=2, kv_heads=4, query_heads=12, head_dim=16, tensor_parallel=2, name="two ranks", rotary=(1.0,) * 8
)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a distribution with entry points `name = value` on the path, as pip would leave it."""

    def with_entry_points(**entries: str) -> Path:
        folder = tmp_path / "site"
        info = folder / "toy_policies-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-policies\nVersion: 1.0\n")
        lines = [f"{name} = {value}" for name, value in entries.items()]
        (info / "entry_points.txt").write_text("\n".join(["[vllm_kvplug.policies]", *lines, ""]))
        monkeypatch.syspath_prepend(folder)
        return folder

    return with_entry_points


# ----------------------------------------------------------------------------------------- third parties


def test_a_third_party_policy_by_entry_point(install):
    assert policy_names() == sorted(BUILT_IN)
    install(ends="toy_policy:Ends")
    assert policy_names() == sorted([*BUILT_IN, "ends"])
    policy = make_policy("ends", {"ends": 3}, SHAPE)
    assert type(policy).__name__ == "Ends"
    assert policy.kept(5) == [[5, 5]] * 3 and policy.kept(100) == [[6, 6]] * 3
    view = PromptView(torch.empty(0, 4, 32), torch.zeros(2, 20, 32), 0, range(2), 1.0, torch.zeros(2, 20, 32))
    assert kept_tokens(policy.score(view), [6, 6]) == [[0, 1, 2, 17, 18, 19]] * 2
    message = error_of(lambda: make_policy("ends", {"end": 3}, SHAPE))
    assert "--kv-policy-config for policy 'ends'" in message and "arena_gib, ends, host_gib" in message


def test_the_command_lists_it(install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    install(ends="toy_policy:Ends")
    monkeypatch.setattr(sys, "argv", ["kvplug", "policies"])
    cli.main()
    shown = capsys.readouterr().out
    assert "ends: The first and the last tokens of a prompt." in shown and "snapkv" in shown
    monkeypatch.setattr(sys, "argv", ["kvplug", "policies", "ends", "--json"])
    cli.main()
    schema = json.loads(capsys.readouterr().out)
    assert list(schema) == ["ends"] and schema["ends"]["properties"]["ends"]["default"] == 8


def test_an_engine_takes_it(install, tiny_model_dir: Path):
    from vllm import EngineArgs

    install(ends="toy_policy:Ends")
    request = {"name": "ends", "ends": 3}
    args = EngineArgs(model=str(tiny_model_dir), skip_tokenizer_init=True, additional_config={"kv_policy": request})
    assert args.create_engine_config().additional_config["kv_policy"] == request


def test_built_in_names_cannot_be_taken_over(install):
    install(snapkv="toy_policy:Ends", ends="toy_policy:Ends")
    assert policy_class("snapkv") is SnapKV
    assert policy_names() == sorted([*BUILT_IN, "ends"])


@pytest.mark.parametrize(
    "value, words",
    [
        ("toy_policy:EndsConfig", ["not a Policy class"]),
        ("toy_policy:torch", ["not a Policy class"]),
        ("toy_policy:Missing", ["cannot load", "Missing"]),
        ("no_such_module_anywhere:Ends", ["cannot load", "no_such_module_anywhere"]),
        ("raises_on_import:Ends", ["cannot load", "half a policy"]),
    ],
)
def test_a_wrong_entry_point(install, value: str, words: list[str]):
    (install(broken=value) / "raises_on_import.py").write_text("raise RuntimeError('half a policy')\n")
    message = error_of(lambda: make_policy("broken", {}, SHAPE))
    for word in ["--kv-policy broken", value, *words]:
        assert word in message
    make_policy("snapkv", {}, SHAPE)


def test_a_broken_policy_hides_no_other(install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    install(broken="no_such_module_anywhere:Ends", ends="toy_policy:Ends")
    monkeypatch.setattr(sys, "argv", ["kvplug", "policies", "--json"])
    cli.main()
    captured = capsys.readouterr()
    assert set(json.loads(captured.out)) == {*BUILT_IN, "ends"}
    assert "kvplug: --kv-policy broken" in captured.err and len(captured.err.splitlines()) == 1


def test_unknown_names_list_the_known(install):
    install(ends="toy_policy:Ends")
    message = error_of(lambda: policy_class("nope"))
    assert "--kv-policy nope" in message and ", ".join(sorted([*BUILT_IN, "ends"])) in message


def test_a_policy_of_a_lowered_configuration():
    text = json.dumps({"name": "snapkv", "ratio": 0.25})
    policy = policy_from_json(text, SHAPE)
    assert isinstance(policy, SnapKV) and policy.config.ratio == 0.25
    assert policy_from_json(text, SHAPE) is policy
    assert policy_from_json(text, TP_SHAPE) is not policy


# -------------------------------------------------------------------------------------- built-in policies


def knobs_of(tmp_path: Path, shape: ModelShape) -> dict[str, list[dict[str, Any]]]:
    """Configurations of every built-in policy: its defaults where they work, and its extremes."""
    profile = str(save_profile(tmp_path / "profile.json", full_heads=2, shape=shape))
    gate, write = str(save_sink_gate(tmp_path / "gate.safetensors", shape)), str(tmp_path / "write.safetensors")
    metadata = GateMetadata(model=ProfiledModel.of_shape(shape), gate=WriteGateShape(hidden=8), source="test", date="-")
    save_gate(write, WriteGate(shape.layers, shape.kv_heads, shape.head_dim, 8), metadata)
    folder = str(tmp_path)
    return {
        "duo": [{"profile": profile}, {"profile": profile, "retrieval": 0.01, "sinks": 0, "recent": 1}],
        "expected_attention": [{}, {"ratio": 0.01, "window": 7, "sinks": 0, "future": 1}, {"budget_tokens": 3}],
        "fastkvzip": [{"gate": gate}, {"gate": gate, "ratio": 0.001, "cut_every": 16}, {"gate": gate, "ratio": 1}],
        "fastkvzip+yakv": [
            {"gate": gate},
            {"gate": gate, "ratio": 0.001, "offload": 1, "min_tokens": 1, "cut_every": 16, "codec": "auto"},
            {"gate": gate, "ratio": 1},
        ],
        "knorm": [
            {},
            {"ratio": 0.001, "window": 1, "cut_every": 16},
            {"ratio": 1},
            {"window": 10_000, "allocation": "layer"},
        ],
        "rkv": [{}, {"decode_budget": 16, "importance": 1}, {"importance": 0}],
        "oracle": [{"scores": folder}, {"scores": folder, "ratio": 0.001, "window": 0}, {"scores": folder, "ratio": 1}],
        "wgkv": [{"gate": write}, {"gate": write, "cap": 0.2, "window": 1, "sinks": 2, "cut_every": 16, "tau": 0}],
        "wgkv+quest": [{"gate": write}, {"gate": write, "budget_tokens": 32, "window": 16}],
        "wgkv+yakv": [
            {"gate": write},
            {"gate": write, "cap": 0.2, "window": 1, "sinks": 2, "cut_every": 16, "min_tokens": 1, "max_tokens": 3},
            {"gate": write, "ratio": 1, "codec": "auto"},
        ],
        "wgkv+snapkv": [{"gate": write}, {"gate": write, "budget": 16, "queries": 1, "window": 1, "kernel": 1}],
        "random": [{}, {"ratio": 0.001}, {"ratio": 1}, {"budget_tokens": 1, "seed": 3}, {"budget_tokens": 10_000}],
        "snapkv": [{}, {"window": 1, "kernel": 1}, {"budget_tokens": 7}, {"ratio": 0.001, "window": 300}, {"ratio": 1}],
        "quest": [{}, {"ratio": 0.001, "dense_layers": 0}, {"budget_tokens": 1}],
        "shadowkv_landmarks": [{}, {"ratio": 1}, {"min_tokens": 1, "max_tokens": 3, "local": 1, "sinks": 2}],
        "yakv": [
            {},
            {"ratio": 1},
            {"sinks": 9, "local": 1, "min_tokens": 1, "max_tokens": 5},
            {"landmarks": "residual"},
        ],
        "streaming": [{}, {"sinks": 0, "window": 1}],
        "synthetic": [{}, {"ratio": 0.001, "full_heads": 0}, {"ratio": 1, "full_heads": 1}, {"seed": 7}],
        "heterocache": [
            {"profile": profile},
            {"profile": profile, "rho": 1},
            {"profile": profile, "rho": 0.51, "min_tokens": 1, "window": 9},
        ],
    }


def save_sink_gate(path: Path, shape: ModelShape) -> Path:
    group = shape.query_heads // shape.kv_heads
    model = ProfiledModel.of_shape(shape)
    metadata = GateMetadata(model=model, gate=SinkGateShape(hidden_size=24), source="test", date="-")
    save_gate(path, SinkGate(shape.layers, shape.kv_heads, group, 24), metadata)
    return path


def test_every_built_in_policy_is_tried(tmp_path: Path):
    assert set(knobs_of(tmp_path, SHAPE)) == set(BUILT_IN)


@pytest.mark.parametrize("shape", [SHAPE, TP_SHAPE], ids=lambda s: s.name)
@pytest.mark.parametrize("name", BUILT_IN)
def test_kept_is_within_the_prompt(tmp_path: Path, name: str, shape: ModelShape):
    for knobs in knobs_of(tmp_path, shape)[name]:
        policy = make_policy(name, knobs, shape)
        assert policy.name == name and policy.summary()
        if not policy.evicts:
            assert policy.ring is not None or policy.page_selection is not None
            continue
        if policy.shares_budget:
            check_cuts(policy)
            continue
        for n in [*range(1, 70), 127, 128, 500, 999, 1023, 1024, 1025, 1999, 2000]:
            kept = policy.kept(n)
            assert [len(layer) for layer in kept] == [shape.kv_heads] * shape.layers
            assert all(isinstance(count, int) and 1 <= count <= n for layer in kept for count in layer)


def check_cuts(policy: Policy[Any]) -> None:
    """What is kept of a prompt in the end is its ratio, up to a token of each cut, and what is always kept."""
    for n in [*range(1, 70), 500, 1024, 15_999, 16_000, 50_001]:
        cuts, heads, kept = policy.cuts(n), 6, 0
        if policy.local is not None:
            left = max(n - cuts.window, 0)
            safe = min(policy.config.sinks, left)
            own = heads if cuts.allocation == "uniform" else 1
            most = safe * heads + int(Fraction(str(policy.config.cap)) * (left - safe) * heads / own) * own
            assert cuts.capped(n, heads) == most
            continue
        assert cuts.prefill_end == n and cuts.window >= 1 and 0 <= cuts.share <= 1
        if not policy.gated:
            assert cuts.share == 1 and cuts.allocation == "uniform" and cuts.decode
            continue
        lengths = [cut for cut in {cuts.next(m) for m in range(n)}]
        for cut in lengths:
            kept += cuts.kept(cut, heads)
        wanted = max(policy.config.ratio * n, cuts.window) * heads
        if policy.selects:  # and what lies on the host
            wanted = min(wanted + policy.config.offload * n * heads, n * heads)
        assert wanted - len(lengths) <= kept + (n - cuts.judged(n)) * heads <= wanted + 1e-6


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("tokens", [1, 2, 15, 64, 65, 200])
def test_scores_rank_every_token(tmp_path: Path, name: str, tokens: int):
    """Rank 1 of 2: KV heads 2 and 3 of 4, each with 3 query heads."""
    for knobs in knobs_of(tmp_path, TP_SHAPE)[name]:
        policy = make_policy(name, knobs, TP_SHAPE)
        if not policy.evicts or policy.selects:
            continue
        if policy.gated:
            check_gate(policy, tokens)
            continue
        if policy.shares_budget and tokens <= policy.query_window:
            continue  # it is asked at the cuts of an answer, which come later
        window = min(policy.query_window, tokens)
        generator = torch.Generator().manual_seed(tokens)
        queries, keys = torch.randn(window, 6, 16, generator=generator), torch.randn(2, tokens, 16, generator=generator)
        scores = policy.score(PromptView(queries, keys, 1, TP_SHAPE.rank_heads(1), 0.25, torch.randn_like(keys)))
        assert scores.shape == (2, tokens) and scores.dtype == torch.float32
        assert not scores.isnan().any()


def check_gate(policy: Policy[Any], tokens: int) -> None:
    """The gate of rank 1 gives what that of a single rank gives its heads."""
    keys = torch.randn(tokens, 4, 16)
    hidden = torch.randn(tokens, 24)

    def scores(heads: range) -> torch.Tensor:
        gate, part = policy.make_gate(heads, torch.float32, torch.device("cpu")), slice(heads.start, heads.stop)
        rows = gate.rows(1)
        assert (0 if rows is None else len(rows)) == policy.gate_columns(len(heads))
        return gate.score(1, keys[:, part], torch.arange(tokens), None if rows is None else hidden @ rows.T)

    found = scores(TP_SHAPE.rank_heads(1))
    assert found.shape == (tokens, 2) and found.dtype == torch.float32 and not found.isnan().any()
    torch.testing.assert_close(found, scores(range(4))[:, 2:])


def test_random_scores_are_those_of_the_global_head(tmp_path: Path):
    """Ranks and replicas agree whatever slice of the heads they hold."""
    policy = make_policy("random", {"seed": 4}, TP_SHAPE)
    whole = policy.score(PromptView(torch.empty(0), torch.zeros(4, 9, 16), 1, range(4), 1.0, torch.zeros(4, 9, 16)))
    for rank in range(2):
        heads = TP_SHAPE.rank_heads(rank)
        part = policy.score(PromptView(torch.empty(0), torch.zeros(2, 9, 16), 1, heads, 1.0, torch.zeros(2, 9, 16)))
        assert torch.equal(part, whole[heads.start : heads.stop])
    assert len({tuple(row.tolist()) for row in whole}) == 4
    other = policy.score(PromptView(torch.empty(0), torch.zeros(4, 9, 16), 0, range(4), 1.0, torch.zeros(4, 9, 16)))
    assert not torch.equal(other, whole)


@pytest.mark.parametrize("budget", [3, 8, 9, 40])
def test_snapkv_keeps_its_window(budget: int):
    """The newest tokens come first, whatever the votes; below the window only the newest of them fit."""
    policy = make_policy("snapkv", {"budget_tokens": budget, "window": 8}, SHAPE)
    queries, keys = torch.randn(8, 4, 32) * 9, torch.randn(2, 60, 32) * 9
    scores = policy.score(PromptView(queries, keys, 0, range(2), 1.0, keys))
    for chosen in kept_tokens(scores, [budget, budget]):
        recent = min(budget, 8)
        assert chosen[-recent:] == list(range(60 - recent, 60))


def test_voters_must_fit_in_the_window(tmp_path: Path):
    """So that at every cut that finds something to evict, the request has so many queries."""
    (knobs, _) = knobs_of(tmp_path, SHAPE)["wgkv+snapkv"]
    message = error_of(lambda: make_policy("wgkv+snapkv", {**knobs, "window": 8, "queries": 9}, SHAPE))
    assert "queries (9)" in message and "window (8)" in message


@pytest.mark.parametrize(
    "knobs, words",
    [
        ({"window": 41}, ["window (41)", "multiple of that"]),
        ({"budget_tokens": 271}, ["budget_tokens (271)", "window (256)"]),
        ({"budget_tokens": 0}, ["budget_tokens"]),
        ({"dense_layers": 2}, ["dense_layers", "budget_tokens"]),
    ],
)
def test_pages_to_choose_lie_behind_the_window(tmp_path: Path, knobs: dict[str, Any], words: list[str]):
    (given, _) = knobs_of(tmp_path, SHAPE)["wgkv+quest"]
    message = error_of(lambda: make_policy("wgkv+quest", {**given, **knobs}, SHAPE))
    assert "--kv-policy-config" in message and all(word in message for word in words)
    make_policy("wgkv+quest", {**given, "budget_tokens": 272}, SHAPE)


@pytest.mark.parametrize("budget, cap, most", [(100, 1, 6 * 105), (100, 0.01, 6 * 5 + 92), (10_000, 0.5, 6 * 5 + 4617)])
def test_a_budget_bounds_what_is_stored_behind_windows(tmp_path: Path, budget: int, cap: float, most: int):
    """In 6 heads, of 1,800 tokens: 256 are in the window, 5 protected."""
    (knobs, _) = knobs_of(tmp_path, SHAPE)["wgkv+snapkv"]
    cuts = make_policy("wgkv+snapkv", {**knobs, "budget": budget, "cap": cap, "sinks": 5}, SHAPE).cuts(1800)
    assert cuts.stored(1800, 6 * 1800, 6) == 6 * 256 + most
    assert cuts.stored(1800, 17, 6) == 17


def test_a_policy_without_knobs_of_its_own():
    class Nothing(Policy[PolicyConfig]):
        """Keeps everything."""

        name = "nothing"

    policy = Nothing(PolicyConfig(), SHAPE)
    assert not policy.evicts and policy.plan().decode_blocks(17, 40) == 3
