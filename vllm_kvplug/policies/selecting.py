"""What policies share that keep prompts on the host and select tokens of them for every query."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar, Generic, Self, TypeVar

from pydantic import Field

from vllm_kvplug.config import CONFIG_FLAG, PolicyConfig
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.plan import Kept, PagePlan, Plan, ceil_div
from vllm_kvplug.policies.from_host import FromHost
from vllm_kvplug.selection import Ranges, Selection, SelectionPlan
from vllm_kvplug.shape import ModelShape
from vllm_kvplug.tiers.ledger import HOST_SLOT


class SelectingConfig(PolicyConfig):
    request_knob = "ratio"

    ratio: float = Field(default=0.03125, gt=0, le=1, description="Share of the prompt that each head selects.")
    min_tokens: int = Field(default=16, ge=1, description="Fewest tokens that a head selects, ratio notwithstanding.")
    max_tokens: int | None = Field(default=None, ge=1, description="Most tokens that a head selects.")
    sinks: int = Field(default=0, ge=0, description="First tokens, which every query attends to as they are.")
    local: int = Field(default=64, ge=1, description="Last prompt tokens, which every query attends to as they are.")
    host_gib: float = Field(default=4.0, gt=0, description="Host memory per rank for prompts, in GiB.")

    def for_budget(self, budget: float) -> Self:
        return type(self)(**{**self.model_dump(exclude_unset=True, exclude={"max_tokens"}), "ratio": budget})


ConfigT = TypeVar("ConfigT", bound=SelectingConfig)


class SelectingPolicy(FromHost[ConfigT], Generic[ConfigT]):
    """Prompts go to the host; heads keep landmarks, the first and last tokens, and what a query selects by them."""

    unit: ClassVar[int] = 1

    def __init__(self, config: ConfigT, shape: ModelShape):
        super().__init__(config, shape)
        if not shape.rotary:
            raise PolicyError(
                f"{self.name} keeps keys as they were before RoPE, and does not know how "
                f"{shape.name or 'this model'} turned them: choose another --kv-policy"
            )
        self.check_budget()

    @property
    def selection(self) -> Selection:
        config = self.config
        bounds = config.ratio, config.min_tokens, config.max_tokens
        return Selection(self.landmarks(), self.codec(), *bounds, self.unit, config.local)

    def most_landmarks(self, tokens: int) -> int:
        return tokens

    def most_selected(self, tokens: int) -> int:
        """A request may ask for more than the server's share."""
        return int(max(self.config.ratio, self.config.max_request_budget) * tokens)

    @cached_property
    def _plan(self) -> Plan:
        if not self.evicts:
            return PagePlan(self.shape, None)
        return SelectionPlan(self.shape, self.selection, self._stays, self.landmark_pages.tokens)

    def _stays(self, prompt_len: int) -> Ranges:
        ends = [(0, min(self.config.sinks, prompt_len)), (max(prompt_len - self.config.local, 0), prompt_len)]
        ranges = self.options.protecting(*(r for r in ends if r[0] < r[1])).protect
        return tuple((start, min(end, prompt_len)) for start, end in ranges if start < prompt_len)

    def kept(self, prompt_len: int) -> Kept:
        plan = self.plan()
        assert isinstance(plan, PagePlan)
        return plan.kept(prompt_len)

    def host_slots(self, prompt_len: int) -> int:
        """Slots of 64 tokens of all heads. It must not fall as the prompt grows: see `Policy.host_slots`."""
        whole = self.config.ratio == 1 and self.config.max_tokens is None
        return 0 if whole or not self.evicts else ceil_div(prompt_len, HOST_SLOT)

    def check_budget(self) -> None:
        if self.config.max_tokens is not None and self.config.max_tokens < self.config.min_tokens:
            raise PolicyError(f"{self.name}: max_tokens is below min_tokens: change one of them in {CONFIG_FLAG}")
