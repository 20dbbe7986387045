"""WG-KV: a gate on keys decides which tokens outlive the local window; the others are never written for long.

2512.17452, sections 3 and 4, and the authors' code: admitted is what scores strictly more than tau.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Self

import torch
from pydantic import Field

from vllm_kvplug import ops
from vllm_kvplug.calibrate.profile import ProfiledModel
from vllm_kvplug.config import PolicyConfig
from vllm_kvplug.cuts import AdmissionCuts, DecodeCuts
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.gates.files import WriteGateShape, find_gate, load_gate, read_metadata
from vllm_kvplug.gates.write_gate import WriteGate
from vllm_kvplug.policies.base import Gate, LocalWindow, Policy
from vllm_kvplug.rotary import Rotary
from vllm_kvplug.shape import ModelShape

DECODE_EVERY = 128
"""Decoded tokens between two looks at whether a request has admitted more than it may."""


class WGKVConfig(PolicyConfig):
    gate: str | None = Field(
        default=None, description="File of `kvplug train-gate wgkv`. Default: the shipped gate of this architecture."
    )
    tau: float | None = Field(
        default=None, ge=0, le=1, description="Admit what scores more. Default: what the gate was trained for."
    )
    window: int | None = Field(
        default=None, ge=1, description="Last tokens that heads see whatever the gate says. Default: the gate's."
    )
    sinks: int = Field(default=0, ge=0, description="First tokens that are protected in every request.")
    cap: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Most of the tokens beyond the window that heads may admit on average; where the gate wants more, "
        "its lowest scores give way. Blocks are planned for this, so only a cap below 1 saves any.",
    )
    cut_every: int = Field(
        default=2048, ge=16, description="Prompt tokens between two looks at the cap; fewer take less memory meanwhile."
    )

    defer: bool = Field(
        default=False,
        description="Score decoded tokens once for every `window` of them and not in each step; they are not asked for "
        "before.",
    )

    def holding(self, tokens: int) -> Self:
        return type(self)(**{**self.model_dump(exclude_unset=True), "tau": 0.0, "cap": 1.0})


class KeyGate:
    """The write gate of one rank's heads, on keys before and after RoPE."""

    def __init__(self, gate: WriteGate, rotary: Rotary, heads: slice):
        self.gate, self._rotary, self._heads = gate, rotary, heads

    def rows(self, layer: int) -> None:
        return None

    def score(
        self, layer: int, key: torch.Tensor, position: torch.Tensor, projected: torch.Tensor | None
    ) -> torch.Tensor:
        gate, rotated = self.gate, key.transpose(0, 1)  # [heads, tokens, d]
        if not key.is_cuda:
            return gate.score(layer, self._rotary.unrotate(rotated, position), rotated, self._heads).T
        scores = torch.empty(key.shape[:2], dtype=torch.float32, device=key.device)
        norms = gate.norm_pre[layer], gate.norm_rope[layer]
        weights = gate.w1[layer], gate.b1[layer], gate.w2[layer], gate.b2[layer]
        ops.write_gate(scores, key, position, self._rotary.frequencies, norms, weights, self._heads.start)
        return scores


class WGKV(Policy[WGKVConfig]):
    """A local window, and behind it what the write gate admitted, promoted when it leaves the window."""

    name = "wgkv"
    Config = WGKVConfig

    def __init__(self, config: WGKVConfig, shape: ModelShape):
        super().__init__(config, shape)
        self.path = find_gate("wgkv", config.gate, shape.fingerprint, shape.name)
        if not shape.rotary:
            raise PolicyError(
                "wgkv reads keys as they were before RoPE, and does not know how "
                f"{shape.name or 'this model'} turned them: choose another --kv-policy"
            )
        trained = read_metadata("wgkv", self.path, shape.fingerprint).gate
        assert isinstance(trained, WriteGateShape)
        self._hidden = trained.hidden
        window = trained.window if config.window is None else config.window
        tau = trained.tau if config.tau is None else config.tau
        self.local = LocalWindow(window, tau, config.sinks, config.defer)

    def cuts(self, prompt_len: int) -> AdmissionCuts:
        assert self.local is not None
        decode = DecodeCuts(DECODE_EVERY, budget=0, sinks=self.local.sinks, recent=self.local.tokens)
        cap = Fraction(str(self.config.cap))
        safe = ((0, self.local.sinks),) if self.local.sinks else ()
        return AdmissionCuts(prompt_len, self.config.cut_every, self.local.tokens, cap, decode, protect=safe)

    def make_gate(self, heads: range, dtype: torch.dtype, device: torch.device) -> Gate:
        gate, _ = load_gate("wgkv", self.path, ProfiledModel.of_shape(self.shape))
        rotary = Rotary(torch.tensor(self.shape.rotary, device=device), 1.0)
        made = KeyGate(gate.to(device, dtype), rotary, slice(heads.start, heads.stop))
        for tokens in (1, 64):  # on CUDA, kernels compile at start-up and never inside a graph capture
            key = torch.zeros((tokens, len(heads), self.shape.head_dim), dtype=dtype, device=device)
            made.score(0, key, torch.zeros(tokens, dtype=torch.int64, device=device), None)
        return made

    def gate_scratch(self, heads: int, itemsize: int, cuda: bool) -> int:
        return heads * 8 if cuda else heads * (8 * 4 * self.shape.head_dim + 3 * itemsize * self._hidden)
