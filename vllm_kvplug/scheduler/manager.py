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
from vllm_kvplug.plan import Plan
from vllm_kvplug.policies.base import Policy
from vllm_kvplug.scheduler.spec import HeadPageSpec
from vllm_kvplug.tiers.ledger import HostLedger


@dataclass
class Admitted:
    """A request that holds blocks. admission: as it was when it got the first. processed: tokens whose steps have
    finished, as the manager last heard.
    """

    admission: Admission
    plan: Plan
    processed: int = 0

    @property
    def prefill_end(self) -> int:
        return self.admission.prefill_end

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
        self._itemsize = self.kv_cache_spec.itemsize
        self.host = HostLedger(self.policy.host_capacity(self._itemsize))
        self._admitted: dict[str, Admitted] = {}

    def admission(self, request_id: str) -> Admission:
        """How the request begins; its tokens so far are its prompt. Call it once it has blocks."""
        return self._admitted[request_id].admission

    def _beginning(self, request_id: str) -> tuple[Admission, Policy[Any]]:
        """How the request would begin now, and the policy that serves it."""
        request = self.requests[request_id]
        admission = Admission(request.num_tokens, self.options(request))
        return admission, self.policy.for_request(admission.options)

    def _state(self, request_id: str) -> Admitted:
        """The request's state, or what it would be if it got its first block now.

        A resumed request computes its prompt and its earlier output as one prompt.
        """
        known = self._admitted.get(request_id)
        if known is not None:
            return known
        admission, policy = self._beginning(request_id)
        return Admitted(admission, policy.plan())

    def tokens_to_cut(self, request_id: str, start: int) -> int | None:
        """How far the request, which has `start` tokens, may go until it has to be cut; None: as far as it likes."""
        state = self._state(request_id)
        cut = state.plan.next_cut(state.prefill_end, start)
        return None if cut is None else cut - start

    def ends_context(self, request_id: str, tokens: int) -> bool:
        """Whether the request is cut at `tokens` although its prompt goes on."""
        state = self._state(request_id)
        return state.plan.shrinks and tokens == state.prefill_end < state.admission.tokens

    def needs_cut(self, request_id: str, start: int, tokens: int) -> bool:
        """Whether a cut at `start` or before has yet to give back blocks without which `tokens` more find no room."""
        state = self._admitted.get(request_id)
        if state is None or not state.plan.cuts(state.prefill_end, state.processed, start):
            return False
        return self._missing_blocks(request_id, start + tokens) > self.block_pool.get_num_free_blocks()

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
        admission, policy = self._beginning(request_id)
        return policy.host_slots(admission.prefill_end)

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
            self._vacate(request_id, state.plan.row_entries(state.prefill_end, cut), before - after)
        state.processed = processed_computed_tokens

    def _vacate(self, request_id: str, end: int, count: int) -> None:
        """Free the last `count` blocks before entry `end` of the row, and leave vLLM's null block in their places."""
        row, freed = self.req_to_blocks[request_id], list[Any]()
        while len(freed) < count:
            end -= 1
            if not row[end].is_null:
                freed.append(row[end])
                row[end] = self._null_block
        self.block_pool.free_blocks(freed)

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
