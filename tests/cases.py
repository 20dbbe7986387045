"""Policies for tests: as the engine is told of them, and the same as rules of the reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from engine_tools import KV_HEADS, LAYERS
from reference import Full, HeteroCache, RandomKeep, Rule, SnapKV, Streaming
from reference_baselines import Duo, ExpectedAttention
from reference_gated import WGKV, FastKVzip, Knorm, WGKVSnapKV
from reference_hosted import Hosted, WGKVYakv
from reference_quest import WGKVQuest
from safetensors.torch import load_file
from transformers import AutoConfig

from vllm_kvplug.calibrate.profile import ProfiledModel
from vllm_kvplug.gates.files import GateMetadata, SinkGateShape, WriteGateShape, save_gate
from vllm_kvplug.gates.sink_gate import SinkGate
from vllm_kvplug.gates.write_gate import WriteGate
from vllm_kvplug.tiny import head_profile


def write_gate(model_dir: Path, path: Path, gate: SinkGate | WriteGate) -> Path:
    config = AutoConfig.from_pretrained(model_dir)
    shape: Any = SinkGateShape(hidden_size=config.hidden_size)
    if isinstance(gate, WriteGate):
        shape = WriteGateShape(hidden=gate.b1.shape[-1])
    save_gate(path, gate, GateMetadata(model=ProfiledModel.of(config, "tiny"), gate=shape, source="test", date="-"))
    return path


@dataclass(frozen=True)
class Case:
    """A policy as the engine is told of it, and the same as a rule of the reference."""

    name: str
    policy: str
    knobs: Mapping[str, Any]
    rule: Rule
    profile: Mapping[str, Any] | None = None
    gate: SinkGate | WriteGate | None = None

    def arguments(self, model_dir: Path, folder: Path) -> dict[str, Any]:
        """Keyword arguments of the engine. A head profile or a gate is written to `folder`."""
        knobs = dict(self.knobs)
        if self.gate is not None:
            knobs["gate"] = str(write_gate(model_dir, folder / f"{self.name}.safetensors", self.gate))
        if self.profile is not None:
            path = folder / f"{self.name}.json"
            head_profile(model_dir, path, **self.profile)
            knobs["profile"] = str(path)
        return {"kv_policy": self.policy, "kv_policy_config": knobs}


TWO_PIVOTS = {
    "roles": [["pivot", "satellite"], ["satellite", "pivot"], ["anchor", "anchor"]],
    "weights": [[-1.0, 0.37], [1.83, -1.0], [0.71, 1.09]],
}
VOLATILE = {  # at rho 0.7 the satellite of layer 1 earns more than the prompt and is clipped to it
    "roles": [["pivot", "satellite"], ["satellite", "pivot"], ["anchor", "volatile"]],
    "weights": [[-1.0, 0.13], [2.6, -1.0], [0.27, -1.0]],
}


def streaming(window: int, sinks: int = 4) -> Case:
    knobs = {"window": window, "sinks": sinks}
    return Case(f"streaming-{window}", "streaming", knobs, Streaming(sinks=sinks, window=window))


def snapkv(ratio: float, allocation: str = "uniform") -> Case:
    rule = SnapKV(ratio=ratio, layers_share=allocation == "layer")
    return Case(f"snapkv-{ratio}-{allocation}", "snapkv", {"ratio": ratio, "allocation": allocation}, rule)


def random_keep(ratio: float, seed: int = 3) -> Case:
    knobs = {"ratio": ratio, "seed": seed}
    return Case(f"random-{ratio}", "random", knobs, RandomKeep(ratio=ratio, seed=seed))


ANGLES = [10_000 ** (-i / 16) for i in range(16)]
"""Of the tiny model's rotary positions."""


def expected_attention(ratio: float, window: int = 512, allocation: str = "uniform") -> Case:
    knobs = {"ratio": ratio, "window": window, "allocation": allocation}
    rule = ExpectedAttention(ANGLES, ratio=ratio, window=window, layers_share=allocation == "layer")
    return Case(f"expected-{ratio}-{window}-{allocation}", "expected_attention", knobs, rule)


GATES = [[0.2, 0.9], [0.9, 0.1], [0.0, 0.4]]


def duo(retrieval: float, sinks: int = 20, recent: int = 40) -> Case:
    """Heads by a profile whose weights are GATES in another unit."""
    knobs = {"retrieval": retrieval, "sinks": sinks, "recent": recent}
    mean = sum(map(sum, GATES)) / (LAYERS * KV_HEADS)
    weights = [[gate / mean for gate in layer] for layer in GATES]
    profile = {"roles": [["anchor"] * KV_HEADS] * LAYERS, "weights": weights}
    return Case(f"duo-{retrieval}", "duo", knobs, Duo(GATES, **knobs), profile)


def heterocache(name: str, profile: Mapping[str, Any], rho: float, window: int = 1) -> Case:
    rule = HeteroCache(dict(profile), rho=rho, window=window)
    knobs = {"rho": rho, "window": window, "host_gib": 0}  # with retrieval: drift_tools
    return Case(f"heterocache-{name}-{rho}", "heterocache", knobs, rule, profile)


def knorm(ratio: float, window: int, every: int, allocation: str = "joint") -> Case:
    knobs = {"ratio": ratio, "window": window, "cut_every": every, "allocation": allocation}
    rule = Knorm(ratio, window, every, allocation=allocation)
    return Case(f"knorm-{ratio}-every-{every}-{allocation}", "knorm", knobs, rule)


def random_sink_gate(shape: tuple[int, ...]) -> SinkGate:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        gate = SinkGate(*shape).requires_grad_(False)
        for weight in gate.parameters():
            weight += 0.3 * torch.randn(weight.shape)
    gate.projection.copy_(gate.projection.bfloat16())  # as files hold it
    return gate


def fastkvzip(
    ratio: float,
    window: int,
    every: int,
    share: float = 0.02,
    shape: tuple[int, ...] = (LAYERS, KV_HEADS, 2, 64),
    decode_budget: int | None = None,
    allocation: str = "joint",
) -> Case:
    """With a gate for a model of (layers, KV heads, group, hidden size), or the tiny one."""
    gate = random_sink_gate(shape)
    weights = dict(gate.state_dict())
    more = {"decode_budget": decode_budget, "allocation": allocation}
    rule = FastKVzip(ratio, window, every, weights=weights, window_share=share, **more)
    knobs = {"ratio": ratio, "window": window, "cut_every": every, "short_window": share, **more}
    return Case(f"fastkvzip-{ratio}-every-{every}-{allocation}", "fastkvzip", knobs, rule, gate=gate)


def fastkvzip_yakv(
    ratio: float, offload: float, window: int, every: int, share: float = 0.02, shape: Any = None, **fields: Any
) -> Case:
    """As `fastkvzip`, with part of what that drops on the host; fields: fetch, min_tokens, codec."""
    gate = random_sink_gate(shape or (LAYERS, KV_HEADS, 2, 64))
    rule = Hosted(ratio, window, every, weights=dict(gate.state_dict()), window_share=share, offload=offload, **fields)
    knobs = {"ratio": ratio, "offload": offload, "window": window, "cut_every": every, "short_window": share, **fields}
    name = f"fastkvzip+yakv-{ratio}-{offload}-every-{every}"
    return Case(name, "fastkvzip+yakv", {"host_gib": 0.05, **knobs}, rule, gate=gate)


def oracle() -> Case:
    """With a budget for which it needs no scores; with scores: test_engine_oracle."""
    return Case("oracle-1", "oracle", {"ratio": 1, "scores": str(Path(__file__).parent)}, Full())


def rkv(budget: int) -> Case:
    """With a budget that holds everything; with others: test_engine_rkv."""
    return Case(f"rkv-{budget}", "rkv", {"decode_budget": budget}, Full())


def yakv() -> Case:
    """With a budget that holds everything; with others: test_engine_yakv."""
    return Case("yakv-1", "yakv", {"ratio": 1, "codec": "auto", "host_gib": 0.05}, Full())


def quest() -> Case:
    """With a budget that holds everything; with others: test_engine_quest."""
    return Case("quest-1", "quest", {"ratio": 1}, Full())


def wgkv(model: Path, shape: tuple[int, ...] = (LAYERS, KV_HEADS, 32), **fields: Any) -> Case:
    """A gate of random weights that lets a part through; shape: (layers, KV heads, head dim), or the tiny model's.

    With a `budget` among the fields, SnapKV evicts what exceeds it; with `budget_tokens`, Quest selects so many; with a
    `codec`, what is admitted goes to the host, of which YAKV selects. `defer` is for the engine alone.
    """
    defer = fields.pop("defer", False)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        gate = WriteGate(*shape, 16).requires_grad_(False)
        for weight in gate.parameters():
            weight += 0.3 * torch.randn(weight.shape)
    gate.w1.copy_(gate.w1.bfloat16())  # as files hold it
    weights = load_file(model / "model.safetensors")
    keys = [weights[f"model.layers.{layer}.self_attn.k_proj.weight"] for layer in range(shape[0])]
    kind, name = (WGKVSnapKV, "wgkv+snapkv") if "budget" in fields else (WGKV, "wgkv")
    kind, name = (WGKVQuest, "wgkv+quest") if "budget_tokens" in fields else (kind, name)
    kind, name = (WGKVYakv, "wgkv+yakv") if "codec" in fields else (kind, name)
    rule = kind(dict(gate.state_dict()), keys, **{"window": 32, "tau": 0.5, **fields})
    knobs = {"window": rule.window, "tau": rule.tau, "sinks": rule.sinks, "cap": rule.cap, "cut_every": rule.every}
    knobs |= {"defer": True} if defer else {}
    if isinstance(rule, WGKVSnapKV):
        knobs |= {"budget": rule.budget, "queries": rule.voters}
    if isinstance(rule, WGKVQuest):
        knobs |= {"budget_tokens": rule.budget_tokens}
    if isinstance(rule, WGKVYakv):
        knobs |= {
            "codec": rule.codec,
            "ratio": rule.ratio,
            "min_tokens": rule.min_tokens,
            "max_tokens": rule.max_tokens,
        }
        knobs |= {"host_gib": 0.05}
    return Case(f"{name}-{rule.window}-{rule.cap}", name, knobs, rule, gate=gate)
