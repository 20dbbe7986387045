"""Fast KVzip's gate decides three ways: a token stays on the device, lies on the host for retrieval, or is dropped.

2601.17668 for the gate and the cuts of a prompt, 2604.08426 for what comes back. Eviction is for good where it is all
there is; here the tokens that come next in the gate's order lie on the host in 4 bits, and every decode query fetches
those that landmarks of 2 bits find for it.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from typing import Literal

from pydantic import Field

from vllm_kvplug.config import share_of
from vllm_kvplug.cuts import Cuts
from vllm_kvplug.plan import PagePlan, Plan, ceil_div
from vllm_kvplug.policies.fastkvzip import GatedPrompt, GatedPromptConfig
from vllm_kvplug.policies.from_host import FromHost
from vllm_kvplug.selection import HostedPlan
from vllm_kvplug.tiers.ledger import HOST_SLOT


class FastKVzipYakvConfig(GatedPromptConfig):
    ratio: float = Field(
        default=0.2,
        gt=0,
        le=1,
        description="Share of the prompt that stays in device memory: of all heads on average, the window counted in.",
    )
    offload: float = Field(
        default=0.3,
        gt=0,
        le=1,
        description="Share of the prompt that every head has on the host beside that; what both exceed 1 by is not.",
    )
    fetch: float = Field(
        default=0.03125, gt=0, le=1, description="Share of the prompt that each query selects of what is on the host."
    )
    min_tokens: int = Field(default=16, ge=1, description="Fewest tokens that a query selects, fetch notwithstanding.")
    codec: Literal["auto", "higgs4"] = Field(
        default="higgs4", description="K and V on the host: in 4 bits a value (higgs4), or as they are (auto)."
    )
    host_gib: float = Field(default=4.0, gt=0, description="Host memory per rank for prompts, in GiB.")


class FastKVzipYakv(FromHost[FastKVzipYakvConfig], GatedPrompt[FastKVzipYakvConfig]):
    """Heads share what stays, by score; every head has the same number of tokens on the host."""

    name = "fastkvzip+yakv"
    Config = FastKVzipYakvConfig

    def landmarks(self) -> str:
        return "higgs2"

    def codec(self) -> Literal["auto", "higgs4"]:
        return self.config.codec

    def cuts(self, prompt_len: int) -> Cuts:
        """What survives is both shares; `offload` of it is each head's own (`HostedPlan`)."""
        config = self.config
        cuts = Cuts.of_ratio(prompt_len, config.cut_every, self.window(prompt_len), config.ratio)
        offload = Fraction(str(config.offload)) * prompt_len / max(prompt_len - cuts.window, 1)
        floor = min(offload, 1 - cuts.share)
        return replace(cuts, share=cuts.share + floor, floor=floor)

    @cached_property
    def _plan(self) -> Plan:
        if not self.evicts:
            return PagePlan(self.shape, None)
        return HostedPlan(self.shape, self._cuts_with_protected, self._selected, self.landmark_pages.tokens)

    def _selected(self, prompt_len: int) -> int:
        return max(share_of(self.config.fetch, prompt_len), self.config.min_tokens)

    def most_landmarks(self, tokens: int) -> int:
        return share_of(self.config.offload, tokens)

    def most_selected(self, tokens: int) -> int:
        """As many as the prompt's share are, of landmarks that are for a share of it themselves."""
        return min(int(self.config.fetch / self.config.offload * tokens), tokens)

    def host_slots(self, prompt_len: int) -> int:
        """Slots of 64 tokens of all heads. It must not fall as the prompt grows: see `Policy.host_slots`."""
        whole = self.config.ratio == 1 or not self.evicts
        return 0 if whole else ceil_div(self.most_landmarks(prompt_len), HOST_SLOT)
