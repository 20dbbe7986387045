"""Blocks of a request as the page plan says; everything else is vLLM's block pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from vllm_kvplug.plan import PagePlan
from vllm_kvplug.scheduler.spec import HeadPageSpec


class HeadPageManager(FullAttentionManager):
    """Counts, shrinks and frees blocks by plan. The scheduler binds `requests` before its first step."""

    requests: Mapping[str, Any] = {}

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._prefill_end: dict[str, int] = {}
        self._shrunk: set[str] = set()

    @property
    def plan(self) -> PagePlan:
        assert isinstance(self.kv_cache_spec, HeadPageSpec)
        return self.kv_cache_spec.plan

    def prefill_end(self, request_id: str) -> int:
        """Tokens after which the request's prompt is complete: latched when it gets its first block.

        A resumed request computes its prompt and its earlier output as one prompt.
        """
        latched = self._prefill_end.get(request_id)
        return self.requests[request_id].num_tokens if latched is None else latched

    def _missing_blocks(self, request_id: str, num_tokens: int) -> int:
        entries = self.plan.row_entries(self.prefill_end(request_id), num_tokens)
        return max(entries - len(self.req_to_blocks.get(request_id, ())), 0)

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> int:
        return self._missing_blocks(request_id, num_tokens)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> list[Any]:
        self._prefill_end.setdefault(request_id, self.prefill_end(request_id))
        missing = self._missing_blocks(request_id, num_tokens)
        if missing == 0:
            return []
        blocks = self.block_pool.get_new_blocks(missing)
        self.req_to_blocks[request_id].extend(blocks)
        return blocks

    def remove_skipped_blocks(self, request_id: str, processed_computed_tokens: int, *args: Any, **kwargs: Any):
        """Give back what the worker vacated at the end of the prompt.

        Called before every allocation with the tokens whose steps have finished. The worker compacts in
        the step that completes the prompt, so once that step is processed the tail is no longer read.
        """
        end = self._prefill_end.get(request_id)
        if not self.plan.shrinks or end is None or processed_computed_tokens < end or request_id in self._shrunk:
            return
        self._shrunk.add(request_id)
        self._remove_blocks_in_range(request_id, self.plan.decode_blocks(end, end), self.plan.prefill_blocks(end))

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        self._prefill_end.pop(request_id, None)
        self._shrunk.discard(request_id)
        return super().pop_blocks_for_free(request_id)

    def cache_blocks(self, *args: Any, **kwargs: Any) -> None:
        """Compressed blocks are never shared between requests."""

    @classmethod
    def find_longest_cache_hit(cls, block_hashes: Any, max_length: int, kv_cache_group_ids: list[int], *args, **kwargs):
        return tuple([] for _ in kv_cache_group_ids), 0
