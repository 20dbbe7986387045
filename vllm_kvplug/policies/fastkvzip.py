"""Fast KVzip: a gate on hidden states says what a model would look up again; the rest goes as the prompt comes in.

2601.17668, sections 3.2 and 3.3, and the authors' code, which says in which ranges tokens are judged.
"""

from __future__ import annotations

from typing import Generic, Self, TypeVar

import torch
from pydantic import Field

from vllm_kvplug.calibrate.profile import ProfiledModel
from vllm_kvplug.config import AllocationKnob, PolicyConfig, share_of
from vllm_kvplug.cuts import Cuts, DecodeCuts
from vllm_kvplug.gates.files import SinkGateShape, find_gate, load_gate, read_metadata
from vllm_kvplug.gates.sink_gate import SinkGate
from vllm_kvplug.policies.base import Gate, Policy
from vllm_kvplug.shape import ModelShape

DECODE_EVERY, SINKS = 128, 4
"""Of eviction while decoding, as in the authors' code: tokens between cuts, the last that stay, and the first."""


class GatedPromptConfig(PolicyConfig):
    """Of policies whose prompts the gate cuts as they come in."""

    request_knob = "ratio"

    gate: str | None = Field(
        default=None,
        description="File of `kvplug train-gate fastkvzip`. Default: the shipped gate of this architecture.",
    )
    ratio: float = Field(
        default=0.3, gt=0, le=1, description="Share of the prompt that heads keep on average, the window counted in."
    )
    window: int = Field(default=4096, ge=1, description="Last tokens that are not judged yet, and always kept.")
    short_window: float = Field(
        default=0.02, ge=0, le=1, description="The window of prompts shorter than cut_every, as a share of them."
    )
    cut_every: int = Field(
        default=16_000, ge=16, description="Prompt tokens between two cuts; fewer take less memory meanwhile."
    )


class FastKVzipConfig(GatedPromptConfig):
    decode_budget: int | None = Field(
        default=None,
        ge=256,
        description="Tokens that heads keep on average while a request decodes, looked at every 128 tokens. Default: "
        "answers are kept whole.",
    )
    allocation: AllocationKnob = "joint"

    def holding(self, tokens: int) -> Self:
        knobs = self.model_dump(exclude_unset=True, exclude={"decode_budget"})
        return type(self)(**{**knobs, "ratio": 1.0})


class HiddenGate:
    """The sink gate of one rank's heads. It reads the layer's hidden states, and no keys.

    The projection, nearly all of the gate, stays on the CPU: the device holds a rank's rows of it, and no float32 copy.
    """

    def __init__(self, gate: SinkGate, heads: slice, dtype: torch.dtype, device: torch.device):
        for name, weight in list(gate.named_parameters()):
            if name not in gate.MATRICES:
                setattr(gate, name, torch.nn.Parameter(weight.to(device), requires_grad=False))
        self._gate, self._heads, self._dtype, self._device = gate, heads, dtype, device

    def rows(self, layer: int) -> torch.Tensor:
        return self._gate.rows(layer, self._heads).to(self._device, self._dtype).contiguous()

    def score(
        self, layer: int, key: torch.Tensor, position: torch.Tensor, projected: torch.Tensor | None
    ) -> torch.Tensor:
        assert projected is not None
        return self._gate.score_projected(layer, projected, self._heads).T


ConfigT = TypeVar("ConfigT", bound=GatedPromptConfig)


class GatedPrompt(Policy[ConfigT], Generic[ConfigT]):
    """A token's score is the gate's estimate of KVzip's reconstruction score."""

    def __init__(self, config: ConfigT, shape: ModelShape):
        super().__init__(config, shape)
        self.path = find_gate("fastkvzip", config.gate, shape.fingerprint, shape.name)
        trained = read_metadata("fastkvzip", self.path, shape.fingerprint).gate
        assert isinstance(trained, SinkGateShape)
        self._dim, self._sinks = trained.dim, trained.sinks

    def window(self, prompt_len: int) -> int:
        """Last tokens of a prompt that cuts do not judge, where the budget pays for so many."""
        config = self.config
        short = prompt_len < config.cut_every
        return min(share_of(config.short_window, prompt_len) if short else config.window, config.window)

    def make_gate(self, heads: range, dtype: torch.dtype, device: torch.device) -> Gate:
        gate, _ = load_gate("fastkvzip", self.path, ProfiledModel.of_shape(self.shape))
        return HiddenGate(gate, slice(heads.start, heads.stop), dtype, device)

    def gate_columns(self, heads: int) -> int:
        group = self.shape.query_heads // self.shape.kv_heads
        return heads * (group + 1) * self._dim

    def gate_scratch(self, heads: int, itemsize: int, cuda: bool) -> int:
        group = self.shape.query_heads // self.shape.kv_heads
        return 4 * (4 * self.gate_columns(heads) + 2 * heads * group * self._sinks)


class FastKVzip(GatedPrompt[FastKVzipConfig]):
    """A budget that a rank's heads share, for prompts as they come in and, with decode_budget, for answers."""

    name = "fastkvzip"
    Config = FastKVzipConfig

    def cuts(self, prompt_len: int) -> Cuts:
        config, budget = self.config, self.config.decode_budget
        decode = DecodeCuts(DECODE_EVERY, budget, SINKS, recent=DECODE_EVERY) if budget else None
        window = self.window(prompt_len)
        return Cuts.of_ratio(prompt_len, config.cut_every, window, config.ratio, decode, config.allocation)
