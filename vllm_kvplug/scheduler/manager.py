"""Blocks of a request as the page plan says; everything else is vLLM's block pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from vllm_kvplug.lifecycle import Admission
from vllm_kvplug.metrics import PREFIX
from vllm_kvplug.options import RequestOptions
from vllm_kvplug.plan import Plan, SharedPlan
from vllm_kvplug.policies.base import Policy
from vllm_kvplug.scheduler.spec import HeadPageSpec
from vllm_kvplug.tiers.ledger import HostLedger


@dataclass
class Admitted:
    """A request that holds blocks. prefill_end: tokens after which its prompt is complete, latched. processed: tokens
    whose steps have finished, as the manager last heard.
    """

    prefill_end: int
    plan: Plan
    processed: int = 0

    @property
    def decoding(self) -> bool:
        return self.processed >= self.prefill_end

    @cached_property
    def kept_tokens(self) -> int:
        """Prompt tokens kept when the prompt is complete, over all heads."""
        return self.plan.kept_tokens(self.prefill_end)


class HeadPageManager(FullAttentionManager):
    """Counts, shrinks and frees blocks by each request's plan, and books its share of the host tier.

    The scheduler binds `requests` and `options` before its first step.
    """

    requests: Mapping[str, Any] = {}
    options: Callable[[Any], RequestOptions] = staticmethod(lambda request: RequestOptions())

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        assert isinstance(self.kv_cache_spec, HeadPageSpec)
        self.policy = self.kv_cache_spec.resolved
        self._itemsize = self.kv_cache_spec.dtype.itemsize
        self.host = HostLedger(self.policy.host_capacity(self._itemsize))
        self._admitted: dict[str, Admitted] = {}

    def admission(self, request_id: str) -> Admission:
        """How the request begins; its tokens so far are its prompt. Call it once it has blocks."""
        return Admission(self._admitted[request_id].prefill_end, self.options(self.requests[request_id]))

    def _policy_of(self, request_id: str) -> Policy[Any]:
        return self.policy.for_request(self.options(self.requests[request_id]))

    def _state(self, request_id: str) -> Admitted:
        """The request's state, or what it would be if it got its first block now.

        A resumed request computes its prompt and its earlier output as one prompt.
        """
        known = self._admitted.get(request_id)
        if known is not None:
            return known
        return Admitted(self.requests[request_id].num_tokens, self._policy_of(request_id).plan())

    def tokens_to_cut(self, request_id: str, start: int) -> int | None:
        """How far the request, which has `start` tokens, may go until it has to be cut; None: as far as it likes."""
        state = self._state(request_id)
        cut = state.plan.cuts_of(state.prefill_end).next(start) if isinstance(state.plan, SharedPlan) else None
        return None if cut is None else cut - start

    def _missing_blocks(self, request_id: str, num_tokens: int) -> int:
        state = self._state(request_id)
        entries = state.plan.row_entries(state.prefill_end, num_tokens)
        return max(entries - len(self.req_to_blocks.get(request_id, ())), 0)

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> int:
        if request_id not in self._admitted:
            if not self.host.fits(self._host_slots(request_id)):
                return self.block_pool.num_gpu_blocks + 1  # more than there are: the request waits
            state = self._state(request_id)
            return state.plan.first_blocks(state.prefill_end, num_tokens)
        return self._missing_blocks(request_id, num_tokens)

    def _host_slots(self, request_id: str) -> int:
        return self._policy_of(request_id).host_slots(self.requests[request_id].num_tokens)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> list[Any]:
        if request_id not in self._admitted:
            self.host.reserve(request_id, self._host_slots(request_id))
            self._admitted[request_id] = self._state(request_id)
        missing = self._missing_blocks(request_id, num_tokens)
        if missing == 0:
            return []
        blocks = self.block_pool.get_new_blocks(missing)
        self.req_to_blocks[request_id].extend(blocks)
        return blocks

    def remove_skipped_blocks(self, request_id: str, processed_computed_tokens: int, *args: Any, **kwargs: Any):
        """Give back what the worker vacated.

        Called before every allocation with the tokens whose steps have finished. The worker cuts a request in the
        step that brings it to a cut's length, so once that step is processed the tail of its row is no longer read.
        """
        state = self._admitted.get(request_id)
        if state is None or processed_computed_tokens <= state.processed:
            return
        for cut in state.plan.cuts(state.prefill_end, state.processed, processed_computed_tokens):
            before, after = state.plan.held(state.prefill_end, cut)
            end = state.plan.row_entries(state.prefill_end, cut)
            self._remove_blocks_in_range(request_id, end - (before - after), end)
        state.processed = processed_computed_tokens

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        self._admitted.pop(request_id, None)
        self.host.release(request_id)
        return super().pop_blocks_for_free(request_id)

    def gauges(self) -> dict[str, int]:
        """What the front end's gauges show."""
        found: dict[str, int] = {}
        if self.host.capacity:
            slot = self.policy.host_slot_bytes(self._itemsize)
            found |= {"host_used_bytes": self.host.used * slot, "host_total_bytes": self.host.capacity * slot}
        decoding = [state for state in self._admitted.values() if state.decoding]
        kept = sum(state.kept_tokens for state in decoding)
        whole = sum(state.prefill_end for state in decoding) * self.policy.shape.heads
        found["kept_ppm"] = round(1e6 * kept / max(whole, 1))
        return {PREFIX + name: value for name, value in found.items()}

    def cache_blocks(self, *args: Any, **kwargs: Any) -> None:
        """Compressed blocks are never shared between requests."""

    @classmethod
    def find_longest_cache_hit(cls, block_hashes: Any, max_length: int, kv_cache_group_ids: list[int], *args, **kwargs):
        return tuple([] for _ in kv_cache_group_ids), 0
