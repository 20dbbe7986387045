"""The KV cache spec that makes vLLM's scheduler count blocks by the page plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_kvplug.plan import Plan
from vllm_kvplug.policies.base import Policy
from vllm_kvplug.policies.registry import policy_from_json
from vllm_kvplug.shape import ModelShape


@lru_cache(maxsize=64)
def _plan(policy: str, shape: ModelShape) -> Plan:
    return policy_from_json(policy, shape).plan()


@dataclass(frozen=True, kw_only=True)
class HeadPageSpec(FullAttentionSpec):
    """A layer whose pages belong to single KV heads. Equal on every tensor-parallel rank.

    policy: the lowered configuration as JSON (hashable, picklable). shape: of the whole model. itemsize: bytes of a
    number of the model, which is not that of its pages under FP8.
    """

    policy: str
    shape: ModelShape
    itemsize: int

    @property
    def resolved(self) -> Policy[Any]:
        return policy_from_json(self.policy, self.shape)

    @property
    def plan(self) -> Plan:
        return _plan(self.policy, self.shape)

    @property
    def prefix_cacheable(self) -> bool:
        return False

    @property
    def uses_slot_mapping(self) -> bool:
        return False

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """The peak of one request of the maximum length: what vLLM's fit check and concurrency use."""
        return self.plan.peak_blocks(vllm_config.model_config.max_model_len) * self.page_size_bytes

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        """More than stock: after shrinking, a row grows behind its dead entries."""
        return self.plan.most_entries(max_len)

    @classmethod
    def merge(cls, specs: list[Any]) -> Any:
        """Stock merging rebuilds the spec from a fixed list of fields and would lose ours."""
        if any(spec != specs[0] for spec in specs):
            raise ValueError("a KV policy needs the same attention geometry in every layer")
        return replace(specs[0])
