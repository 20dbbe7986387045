"""What a forward pass needs to know of its batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class PrefillRow:
    """Several tokens of one request's prompt in this step.

    tokens: their rows in the batch. start, end: their positions. stored: tokens every head holds before.
    finishing: whether the prompt is complete with `end`.
    """

    request_id: str
    slot: int
    tokens: slice
    start: int
    end: int
    stored: int
    finishing: bool


@dataclass(frozen=True)
class Step:
    """Attention metadata of one batch, shared by all layers.

    The first `decode_rows` rows have one token each and go through one launch; their tensors are
    persistent, so that a captured graph reads this step's values. The rest are `prefill` rows.

    row_slot: int32 [decode_rows], the slot of each row's request, -1 for padding.
    phase: int64 [decode_rows], the place of each row's query in the window of the next drift check.
    prefill_plan: of the prefill rows: a `FlashPlan` where FlashAttention serves, the `ops.prefill_plan` else; None on
    the CPU.
    place: int64 [tokens, heads of the rank], where each token's K and V go in each (layer, head), -1 if nowhere.
    position: int64 [tokens], in their sequences; of padding anything.
    protected: bool [tokens], whether they are admitted whatever the gate says; None if none is.
    """

    decode_rows: int
    row_slot: torch.Tensor
    phase: torch.Tensor
    place: torch.Tensor
    position: torch.Tensor
    prefill: tuple[PrefillRow, ...] = ()
    prefill_plan: Any = None
    protected: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        return self.place.shape[0]
