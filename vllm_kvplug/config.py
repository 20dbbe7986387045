"""Policy configuration: from a flag's JSON to a checked, frozen object.

Errors name the flag to change. The knobs every policy shares are here; its own stand in its file.
"""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from vllm_kvplug.cuts import Allocation
from vllm_kvplug.errors import PolicyError

FLAG = "--kv-policy"
CONFIG_FLAG = "--kv-policy-config"
ADDITIONAL_KEY = "kv_policy"


def _odd(value: int) -> int:
    if value % 2 == 0:
        raise ValueError("must be odd, so that the pool is centred")
    return value


PoolWidth = Annotated[int, Field(ge=1), AfterValidator(_odd)]
"""Width of a centred average pool over token scores."""


AllocationKnob = Annotated[
    Allocation,
    Field(
        description="Who shares the budget: joint, all heads; layer, the heads of each layer, where every head first "
        "keeps its own best tokens up to a fifth of an even share; uniform, nobody: heads store the same number."
    ),
]

LayerAllocationKnob = Annotated[
    Literal["uniform", "layer"],
    Field(
        description="Who shares the budget: uniform, nobody; layer, the heads of each layer (AdaKV), where every head "
        "first keeps its own best tokens up to a fifth of an even share."
    ),
]


def share_of(ratio: float, tokens: int) -> int:
    """`ratio` of `tokens`, rounded down, with the ratio taken as written: 0.29 of 100 is 29."""
    return int(Fraction(str(ratio)) * tokens)


class PolicyConfig(BaseModel):
    """Knobs every policy has. Unknown knobs are errors.

    request_knob names the field that a request's `kvplug.budget` replaces; None: the budget is the server's alone.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    request_knob: ClassVar[str | None] = None

    arena_gib: float | None = Field(
        default=None,
        gt=0,
        description="Limit on the memory for page tables and query windows, in GiB; start-up fails when more is "
        "needed. Default: whatever the model and --max-num-seqs need, which the log says.",
    )
    host_gib: float = Field(
        default=0.0,
        ge=0,
        description="Size of the host (CPU) tier in GiB, for policies that offload.",
    )
    max_request_budget: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Largest kvplug.budget that a request may ask for, and the largest share of its prompt that "
        "kvplug.protect may cover; below 1 also refuses kvplug.off.",
    )
    protect_system: bool = Field(
        default=True,
        description="Never drop the system prompt's tokens, where the model's chat template shows which they are.",
    )

    def for_budget(self, budget: float) -> Self:
        """The same with a request's budget. Raises ValueError (pydantic's) if the policy cannot work with it."""
        assert self.request_knob is not None
        return type(self)(**{**self.model_dump(exclude_unset=True), self.request_knob: budget})

    def holding(self, tokens: int) -> Self:
        """The same with a budget that drops nothing of requests of up to `tokens` tokens."""
        return self if self.request_knob is None else self.for_budget(1.0)


class BudgetConfig(PolicyConfig):
    """A per-head budget: a share of the prompt, or a number of tokens."""

    request_knob = "ratio"

    ratio: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of the prompt every head keeps (0.5 unless budget_tokens is given).",
    )
    budget_tokens: int | None = Field(
        default=None, ge=1, description="Tokens every head keeps, instead of a share of the prompt."
    )

    def tokens(self, prompt_len: int) -> int:
        """Tokens a head keeps of a prompt of `prompt_len` tokens: at least one, at most all."""
        if self.budget_tokens is not None:
            return min(self.budget_tokens, prompt_len)
        ratio = 0.5 if self.ratio is None else self.ratio
        return min(max(share_of(ratio, prompt_len), 1), prompt_len)

    def for_budget(self, budget: float) -> Self:
        return type(self)(**{**self.model_dump(exclude_unset=True, exclude={"budget_tokens"}), "ratio": budget})

    def model_post_init(self, _context: Any) -> None:
        if self.ratio is not None and self.budget_tokens is not None:
            raise ValueError("give ratio or budget_tokens, not both")


def read_knobs(value: Any) -> dict[str, Any]:
    """The value of `--kv-policy-config`, a dict or its JSON, as a dict. Which policy it is for is not a knob."""
    try:
        knobs = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise PolicyError(f"{CONFIG_FLAG} is not JSON: {error}") from None
    if not isinstance(knobs, dict) or not all(isinstance(knob, str) for knob in knobs):
        raise PolicyError(f"{CONFIG_FLAG} must be a JSON object of knobs, got {value!r}")
    if "name" in knobs:
        raise PolicyError(f"{CONFIG_FLAG} cannot hold 'name': the policy's name is the value of {FLAG}")
    return dict(knobs)


def parse_knobs(config_class: type[PolicyConfig], name: str, knobs: dict[str, Any]) -> PolicyConfig:
    """`knobs` as `config_class`, or a PolicyError that names `--kv-policy-config` and every wrong knob."""
    try:
        return config_class(**knobs)
    except ValidationError as error:
        known = ", ".join(sorted(config_class.model_fields))
        raise PolicyError(
            f"{CONFIG_FLAG} for policy '{name}': {explain(error)}. Knobs of this policy: {known}."
        ) from None


def explain(error: ValidationError) -> str:
    """Everything that is wrong, in one line: where, and why."""
    return "; ".join(
        f"{'.'.join(str(part) for part in item['loc']) or 'config'}: {item['msg']}" for item in error.errors()
    )


def split_request(value: Any) -> tuple[str, dict[str, Any]]:
    """`additional_config['kv_policy']` -> (policy name, knobs). Accepts a name or {'name': ..., knobs}."""
    if isinstance(value, str):
        return value, {}
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise PolicyError(
            f"additional_config['{ADDITIONAL_KEY}'] must be a policy name or {{'name': NAME, ...knobs}}, got {value!r}"
        )
    knobs = dict(value)
    return knobs.pop("name"), knobs
