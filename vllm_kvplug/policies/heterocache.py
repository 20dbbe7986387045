"""HeteroCache: heads are profiled once and get budgets by their stability (2601.13684).

Volatile and pivot heads keep the whole prompt. Anchors and satellites share the rest of the budget by
their profiled weight and keep, at the end of the prompt, the tokens their own last query attends to.
Satellites' prompts are also stored on the host: while decoding, each pivot watches whether its attention
drifts from what it was, and if so its satellites get the tokens that it attends to now.
Where the released code loses budget (a head's share clipped at the prompt length, or rounded to nothing)
this gives it to the other compressed heads and never leaves a head empty.
"""

from __future__ import annotations

import torch
from pydantic import Field

from vllm_kvplug.components.allocators import water_fill
from vllm_kvplug.components.scorers import prompt_attention, smooth
from vllm_kvplug.config import CONFIG_FLAG, PolicyConfig, PoolWidth, share_of
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.plan import Kept
from vllm_kvplug.policies.base import Cluster, Policy, PromptView, Retrieval
from vllm_kvplug.policies.profiles import load_profile
from vllm_kvplug.quant.higgs import MAX_GROUP
from vllm_kvplug.shape import ModelShape
from vllm_kvplug.tiers.codecs import CodecName

TAU_DRIFT = 0.5
"""The paper's threshold for Llama, where a profile does not say what it was made with."""


class HeteroCacheConfig(PolicyConfig):
    request_knob = "rho"

    rho: float = Field(default=0.5, gt=0, le=1, description="Share of its full KV cache that a prompt keeps.")
    profile: str | None = Field(
        default=None,
        description="Head profile (JSON from `kvplug profile`). Default: the shipped profile of this architecture.",
    )
    min_tokens: int = Field(default=16, ge=1, description="Fewest tokens a compressed head keeps, rho notwithstanding.")
    window: int = Field(default=1, ge=1, description="Last prompt queries that score; the paper uses one.")
    kernel: PoolWidth = Field(default=5, description="Width of the average pool over scores.")
    host_gib: float = Field(
        default=4.0, ge=0, description="Host memory per rank for satellites' prompts, in GiB; 0: no retrieval."
    )
    codec: CodecName = Field(
        default="auto", description="K and V on the host: as they are (auto), or in 8 (fp8) or 4 bits (higgs4) a value."
    )
    tau_drift: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="A pivot has drifted when the median overlap with its baseline is below this. "
        "Default: the profile's tau_stable.",
    )
    drift_window: PoolWidth = Field(default=5, description="Decoded tokens from one drift check to the next.")
    land_after: int = Field(
        default=1,
        ge=1,
        description="Steps from a trigger to the first step that sees what it fetched; more hide a slower copy.",
    )
    fetch_mib_per_step: float | None = Field(
        default=None, gt=0, description="MiB fetched from the host in one step; what exceeds it lands later."
    )
    as_released: bool = Field(
        default=False, description="Budgets, baselines and fetched tokens of the authors' code where it differs."
    )


class HeteroCache(Policy[HeteroCacheConfig]):
    """Roles, budgets with redistribution, each compressed head's own top tokens, retrieval when attention drifts."""

    name = "heterocache"
    Config = HeteroCacheConfig
    uses_host_tier = True

    def __init__(self, config: HeteroCacheConfig, shape: ModelShape):
        super().__init__(config, shape)
        self.query_window = config.window
        self.profile = load_profile(self.name, config.profile, shape)
        self.retrieval = self._retrieval() if config.host_gib else None
        self.check_budget()

    def _retrieval(self) -> Retrieval | None:
        config, settings = self.config, self.profile.provenance.settings
        clusters = tuple(
            Cluster(layer, pivot, satellites)
            for layer, led in enumerate(self.profile.clusters)
            for pivot, satellites in led.items()
        )
        if not clusters:
            return None
        if config.as_released and self.shape.tensor_parallel > 1:
            raise PolicyError(f"heterocache: as_released needs one GPU: remove it from {CONFIG_FLAG}")
        if config.codec == "higgs4" and self.shape.head_dim > MAX_GROUP:
            raise PolicyError(
                f"heterocache: codec higgs4 takes heads of at most {MAX_GROUP} values, the model's have "
                f"{self.shape.head_dim}: set codec to fp8 in {CONFIG_FLAG}"
            )
        default = settings.tau_stable if settings else TAU_DRIFT
        return Retrieval(
            clusters,
            threshold=default if config.tau_drift is None else config.tau_drift,
            window=config.drift_window,
            kernel=config.kernel,
            land_after=config.land_after,
            codec=config.codec,
            step_mib=config.fetch_mib_per_step,
            as_released=config.as_released,
        )

    def check_budget(self) -> None:
        paid, rho = share_of(self.config.rho, self.shape.heads), self.config.rho
        if paid <= self.profile.num_full and self.profile.num_compressed and rho < 1:
            raise PolicyError(
                f"heterocache: rho={rho} pays for {paid} of {self.shape.heads} heads, but the profile keeps "
                f"{self.profile.num_full} heads (volatile and pivot) whole. Set rho to {self.profile.smallest_rho} or "
                f"more in {CONFIG_FLAG}, or profile the model with a lower --tau-stable or --tau-sim."
            )

    def kept(self, prompt_len: int) -> Kept:
        weights = [w for row in self.profile.weights for w in row if w >= 0]
        if self.config.as_released:
            base = self.drift_tokens(prompt_len)
            budgets = iter([min(max(int(base * w), 1), prompt_len) for w in weights])
        else:
            low = min(self.config.min_tokens, prompt_len)
            budgets = iter(water_fill(self._compressed_tokens(prompt_len), weights, low, prompt_len))
        return [[prompt_len if w < 0 else next(budgets) for w in row] for row in self.profile.weights]

    def drift_tokens(self, prompt_len: int) -> int:
        """L_base: the mean budget of a compressed head."""
        share = self._compressed_tokens(prompt_len) // max(self.profile.num_compressed, 1)
        return min(max(share, 1), prompt_len)

    def _compressed_tokens(self, prompt_len: int) -> int:
        """Tokens that all anchors and satellites keep together."""
        return share_of(self.config.rho, self.shape.heads * prompt_len) - self.profile.num_full * prompt_len

    def score(self, view: PromptView) -> torch.Tensor:
        attention = prompt_attention(view.queries, view.keys, view.scale)  # [H, G, window, tokens]
        return smooth(attention.mean(2), self.config.kernel).amax(1)

    def summary(self) -> str:
        p = self.profile
        return f"{super().summary()}, full heads={p.num_full}/{self.shape.heads} (profile of {p.model.name})"
