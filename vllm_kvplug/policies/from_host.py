"""What policies share whose decode queries select tokens of the host tier, by landmarks in head pages."""

from __future__ import annotations

from functools import cached_property
from typing import Generic, TypeVar

from vllm_kvplug.components.landmarks import LandmarkPages
from vllm_kvplug.config import PolicyConfig
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.policies.base import Policy
from vllm_kvplug.quant.higgs import MAX_GROUP
from vllm_kvplug.shape import ModelShape
from vllm_kvplug.tiers.codecs import CodecName, token_bytes
from vllm_kvplug.tiers.ledger import HOST_SLOT

ConfigT = TypeVar("ConfigT", bound=PolicyConfig)


class FromHost(Policy[ConfigT], Generic[ConfigT]):
    """A host slot has 64 tokens of all heads of a rank, and all heads select the same number of tokens."""

    uses_host_tier = True
    selects = True

    def __init__(self, config: ConfigT, shape: ModelShape):
        super().__init__(config, shape)
        if shape.head_dim > MAX_GROUP:
            raise PolicyError(
                f"{self.name} takes heads of at most {MAX_GROUP} values, the model's have {shape.head_dim}: choose "
                "another --kv-policy"
            )

    def landmarks(self) -> str:
        """Their format."""
        raise NotImplementedError

    def codec(self) -> CodecName:
        """Of K and V on the host."""
        raise NotImplementedError

    def most_landmarks(self, tokens: int) -> int:
        """Most landmarks of a head of a request with a prompt of so many tokens, whatever its options."""
        raise NotImplementedError

    def most_selected(self, tokens: int) -> int:
        """Most tokens that a head with landmarks of so many prompt tokens selects, but for a least number."""
        raise NotImplementedError

    @cached_property
    def landmark_pages(self) -> LandmarkPages:
        return LandmarkPages(self.landmarks(), self.shape.head_dim, self.shape.page_bytes)

    @property
    def offloads(self) -> bool:
        return True

    def host_slot_bytes(self, itemsize: int) -> int:
        heads = self.shape.layers * self.shape.rank_kv_heads
        return HOST_SLOT * heads * token_bytes(self.codec(), self.shape.head_dim, itemsize)
