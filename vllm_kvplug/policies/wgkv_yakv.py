"""WG-KV's gate decides what is stored at all, and YAKV where: what it admitted of a prompt lies on the host in 4 bits.

2512.17452 for the gate and its local window, 2604.08426 for what comes back. The window stays in device memory, and
landmarks of 2 bits of what was admitted; every decode query fetches what it finds best by them. What leaves the window
while a request decodes, and is admitted, stays in device memory, as decoded tokens do under YAKV.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Literal, Self

from pydantic import Field

from vllm_kvplug.config import CONFIG_FLAG, share_of
from vllm_kvplug.cuts import AdmissionCuts
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.plan import Plan, ceil_div
from vllm_kvplug.policies.from_host import FromHost
from vllm_kvplug.policies.wgkv import WGKV, WGKVConfig
from vllm_kvplug.selection import AdmittedPlan, Chosen
from vllm_kvplug.shape import ModelShape
from vllm_kvplug.tiers.ledger import HOST_SLOT


class WGKVYakvConfig(WGKVConfig):
    cap: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Most of the prompt's tokens beyond the window that any head may admit; where the gate wants more, "
        "the head's lowest scores give way. Landmarks and host memory are reserved for this.",
    )
    ratio: float = Field(
        default=0.125, gt=0, le=1, description="Share of what a head has on the host that each query selects."
    )
    min_tokens: int = Field(default=16, ge=1, description="Fewest tokens that a head selects, ratio notwithstanding.")
    max_tokens: int | None = Field(default=None, ge=1, description="Most tokens that a head selects.")
    codec: Literal["auto", "higgs4"] = Field(
        default="higgs4", description="K and V on the host: in 4 bits a value (higgs4), or as they are (auto)."
    )
    host_gib: float = Field(default=4.0, gt=0, description="Host memory per rank for prompts, in GiB.")

    def holding(self, tokens: int) -> Self:
        given = self.model_dump(exclude_unset=True, exclude={"max_tokens"})
        return type(self)(**{**given, "tau": 0.0, "cap": 1.0, "ratio": 1.0})


class WGKVYakv(FromHost[WGKVYakvConfig], WGKV):
    """The write gate for admission, YAKV for storage and selection. Heads have on the host what they have admitted."""

    name = "wgkv+yakv"
    Config = WGKVYakvConfig
    config: WGKVYakvConfig

    def __init__(self, config: WGKVYakvConfig, shape: ModelShape):
        super().__init__(config, shape)
        if config.max_tokens is not None and config.max_tokens < config.min_tokens:
            raise PolicyError(f"{self.name}: max_tokens is below min_tokens: change one of them in {CONFIG_FLAG}")

    def landmarks(self) -> str:
        return "higgs2"

    def codec(self) -> Literal["auto", "higgs4"]:
        return self.config.codec

    def cuts(self, prompt_len: int) -> AdmissionCuts:
        """Of the prompt alone, and every head's cap is its own: what heads have on the host is counted evenly."""
        return replace(super().cuts(prompt_len), decode=None, allocation="uniform")

    @cached_property
    def _plan(self) -> Plan:
        chosen = Chosen(self.config.ratio, self.config.min_tokens, self.config.max_tokens)
        return AdmittedPlan(self.shape, self._admission, chosen, self.landmark_pages.tokens)

    def _admission(self, prompt_len: int) -> AdmissionCuts:
        cuts = self._cuts_with_protected(prompt_len)
        assert isinstance(cuts, AdmissionCuts)
        return cuts

    def most_landmarks(self, tokens: int) -> int:
        return share_of(self.config.cap, tokens)

    def most_selected(self, tokens: int) -> int:
        return share_of(self.config.ratio, tokens)

    def host_slots(self, prompt_len: int) -> int:
        """Slots of 64 tokens of all heads. It must not fall as the prompt grows: see `Policy.host_slots`."""
        whole = self.config.ratio == 1 and self.config.max_tokens is None
        return 0 if whole else ceil_div(self._admission(prompt_len).guaranteed(), HOST_SLOT)
