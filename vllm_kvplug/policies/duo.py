"""DuoAttention: some heads keep the whole prompt, the others its first tokens and its last (2410.10819).

Which heads is a property of the model, known before the prompt. The paper trains a gate per KV head; give its
published file as `gates`. Without one, heads are ranked by a head profile that was made for another purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
from pydantic import Field

from vllm_kvplug.calibrate.profile import HeadProfile
from vllm_kvplug.config import CONFIG_FLAG, PolicyConfig, share_of
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.plan import Kept
from vllm_kvplug.policies.base import Policy, PromptView
from vllm_kvplug.policies.profiles import load_profile
from vllm_kvplug.shape import ModelShape


class DuoConfig(PolicyConfig):
    request_knob = "retrieval"

    retrieval: float = Field(default=0.5, gt=0, le=1, description="Share of heads that keep the whole prompt.")
    sinks: int = Field(default=128, ge=0, description="First prompt tokens that the other heads keep.")
    recent: int = Field(default=256, ge=1, description="Last prompt tokens that the other heads keep.")
    gates: str | None = Field(
        default=None,
        description="File with DuoAttention's gate of every KV head, a line per layer, tab-separated "
        "(full_attention_heads.tsv). Heads of large gates keep the whole prompt.",
    )
    profile: str | None = Field(
        default=None,
        description="Without gates: head profile (JSON from `kvplug profile`). Default: the shipped one of this model.",
    )

    def holding(self, tokens: int) -> Self:
        """With every head whole it does not matter which are the better ones, so gates go."""
        return type(self)(**{**self.model_dump(exclude_unset=True, exclude={"gates"}), "retrieval": 1.0})


class Duo(Policy[DuoConfig]):
    """Retrieval heads keep the whole prompt, streaming heads its first and last tokens."""

    name = "duo"
    Config = DuoConfig

    def __init__(self, config: DuoConfig, shape: ModelShape):
        super().__init__(config, shape)
        if config.gates and config.profile:
            raise PolicyError(f"duo: give gates or profile in {CONFIG_FLAG}, not both")
        if config.gates:
            merit = read_gates(Path(config.gates), shape)
        else:
            merit = profiled_merit(load_profile(self.name, config.profile, shape))
        flat = [m for layer in merit for m in layer]
        self._by_merit = sorted(range(shape.heads), key=lambda head: (-flat[head], head))

    def kept(self, prompt_len: int) -> Kept:
        whole = set(self._by_merit[: share_of(self.config.retrieval, self.shape.heads)])
        ends = min(self.config.sinks + self.config.recent, prompt_len)
        flat = [prompt_len if head in whole else ends for head in range(self.shape.heads)]
        return [flat[i : i + self.shape.kv_heads] for i in range(0, len(flat), self.shape.kv_heads)]

    def score(self, view: PromptView) -> torch.Tensor:
        rank = torch.arange(view.keys.shape[1], dtype=torch.float32, device=view.keys.device)
        rank[: self.config.sinks] = torch.inf
        return rank.expand(view.keys.shape[0], -1)


def profiled_merit(profile: HeadProfile) -> Sequence[Sequence[float]]:
    """[L][H], larger for heads that need the whole prompt: those a profile keeps whole, then the least stable."""
    return [[weight if weight >= 0 else float("inf") for weight in layer] for layer in profile.weights]


def read_gates(path: Path, shape: ModelShape) -> Sequence[Sequence[float]]:
    """DuoAttention's gates [L][H]; PolicyError if the file is none, or another model's."""
    try:
        gates = [[float(gate) for gate in line.split()] for line in path.read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise PolicyError(f"duo: cannot read the gates in {CONFIG_FLAG}: {error}") from None
    if [len(layer) for layer in gates] != [shape.kv_heads] * shape.layers:
        raise PolicyError(
            f"duo: {path}, the gates in {CONFIG_FLAG}, are not those of {shape.name or 'this model'}: "
            f"{shape.layers} layers of {shape.kv_heads} KV heads"
        )
    return gates
