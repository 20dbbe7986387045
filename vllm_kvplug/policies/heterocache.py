"""HeteroCache: heads are profiled once and get budgets by their stability (2601.13684).

Volatile and pivot heads keep the whole prompt. Anchors and satellites share the rest of the budget by
their profiled weight and keep, at the end of the prompt, the tokens their own last query attends to.
Dropped tokens are gone: retrieval from the host is not part of this policy yet, so satellites act as anchors.
Where the released code loses budget (a head's share clipped at the prompt length, or rounded to nothing)
this gives it to the other compressed heads and never leaves a head empty.
"""

from __future__ import annotations

from pathlib import Path

import torch
from pydantic import Field, ValidationError

from vllm_kvplug.calibrate.profile import HeadProfile, find_shipped
from vllm_kvplug.components.allocators import water_fill
from vllm_kvplug.components.scorers import prompt_attention, smooth
from vllm_kvplug.config import CONFIG_FLAG, PolicyConfig, PoolWidth, explain, share_of
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.plan import Kept
from vllm_kvplug.policies.base import Policy, PromptView
from vllm_kvplug.shape import ModelShape


class HeteroCacheConfig(PolicyConfig):
    rho: float = Field(default=0.5, gt=0, le=1, description="Share of its full KV cache that a prompt keeps.")
    profile: str | None = Field(
        default=None,
        description="Head profile (JSON from `kvplug profile`). Default: the shipped profile of this architecture.",
    )
    min_tokens: int = Field(default=16, ge=1, description="Fewest tokens a compressed head keeps, rho notwithstanding.")
    window: int = Field(default=1, ge=1, description="Last prompt queries that score; the paper uses one.")
    kernel: PoolWidth = Field(default=5, description="Width of the average pool over scores.")


class HeteroCache(Policy[HeteroCacheConfig]):
    """Roles, budgets with redistribution, and each compressed head's own top tokens."""

    name = "heterocache"
    Config = HeteroCacheConfig

    def __init__(self, config: HeteroCacheConfig, shape: ModelShape):
        super().__init__(config, shape)
        self.query_window = config.window
        self.profile = load_profile(config.profile, shape)
        paid = share_of(config.rho, shape.heads)
        if paid <= self.profile.num_full and self.profile.num_compressed and config.rho < 1:
            raise PolicyError(
                f"heterocache: rho={config.rho} pays for {paid} of {shape.heads} heads, but the profile keeps "
                f"{self.profile.num_full} heads (volatile and pivot) whole. Set rho to {self.profile.smallest_rho} or "
                f"more in {CONFIG_FLAG}, or profile the model with a lower --tau-stable or --tau-sim."
            )

    def kept(self, prompt_len: int) -> Kept:
        weights = [w for row in self.profile.weights for w in row if w >= 0]
        heads = self.shape.heads
        total = share_of(self.config.rho, heads * prompt_len) - self.profile.num_full * prompt_len
        budgets = iter(water_fill(total, weights, min(self.config.min_tokens, prompt_len), prompt_len))
        return [[prompt_len if w < 0 else next(budgets) for w in row] for row in self.profile.weights]

    def score(self, view: PromptView) -> torch.Tensor:
        attention = prompt_attention(view.queries, view.keys, view.scale)  # [H, G, window, tokens]
        return smooth(attention.mean(2), self.config.kernel).amax(1)

    def summary(self) -> str:
        p = self.profile
        return f"{super().summary()}, full heads={p.num_full}/{self.shape.heads} (profile of {p.model.name})"


def load_profile(path: str | None, shape: ModelShape) -> HeadProfile:
    """The profile at `path`, or the shipped one of this architecture; PolicyError if it does not fit."""
    found = Path(path) if path else find_shipped(shape.fingerprint)
    advice = f'run `kvplug profile MODEL --texts FILE` and pass {CONFIG_FLAG} \'{{"profile": "OUT.json"}}\''
    if found is None:
        raise PolicyError(f"heterocache has no shipped head profile for {shape.name or 'this model'}: {advice}.")
    try:
        profile = HeadProfile.load(found)
    except OSError as error:
        raise PolicyError(f"heterocache: cannot read the profile in {CONFIG_FLAG}: {error}") from None
    except ValueError as error:
        reason = explain(error) if isinstance(error, ValidationError) else error
        raise PolicyError(f"heterocache: {found}, the profile in {CONFIG_FLAG}, is no head profile: {reason}") from None
    made_for = (profile.model.layers, profile.model.kv_heads, profile.model.query_heads, profile.model.head_dim)
    needed = (shape.layers, shape.kv_heads, shape.query_heads, shape.head_dim)
    if made_for != needed:
        raise PolicyError(
            f"heterocache: profile {found} was made for {profile.model.name} with (layers, KV heads, query heads, "
            f"head dim) = {made_for}; {shape.name or 'this model'} has {needed}. For this model, {advice}."
        )
    return profile
