"""The attention backend that vLLM selects as CUSTOM: metadata, forward, and their way to the runtime."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from vllm_kvplug import compat, ops
from vllm_kvplug.shape import PAGE
from vllm_kvplug.worker.attention import Gated, chunk_attention
from vllm_kvplug.worker.flash import FlashPlan, flash_attention
from vllm_kvplug.worker.runtime import Runtime
from vllm_kvplug.worker.sparse import SparsePlan, sparse_attention
from vllm_kvplug.worker.step import PrefillRow, Step


class HeadPageBackend(AttentionBackend):
    """KV in head pages: a block is layers * KV heads pages of 16 tokens, in layout BLHNC."""

    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]
    forward_includes_kv_cache_update = True  # vLLM's slot mapping, one place for all heads, is never used

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(PAGE)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.BLHNC,)

    @staticmethod
    def get_impl_cls() -> type[HeadPageImpl]:
        return HeadPageImpl

    @staticmethod
    def get_builder_cls() -> type[HeadPageBuilder]:
        return HeadPageBuilder


class HeadPageBuilder(AttentionMetadataBuilder):
    """Hands a batch to the runtime, once per step."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold = 1  # one-token rows first

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.runtime: Runtime = compat.runtime_of(vllm_config)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Step:
        meta = common_attn_metadata
        rows, tokens = meta.num_reqs, meta.num_actual_tokens
        if not self.runtime.in_step:
            return self.runtime.padding_step(rows, tokens)
        assert meta.seq_lens_cpu_upper_bound is not None
        request_ids = compat.request_ids(self.runtime.runner, meta)
        return self.runtime.prepare(
            request_ids,
            meta.query_start_loc_cpu[: len(request_ids) + 1].tolist(),
            meta.seq_lens_cpu_upper_bound[: len(request_ids)].tolist(),
            meta.seq_lens,
            meta.block_table_tensor,
            rows,
            tokens,
        )


class HeadPageImpl(AttentionImpl):
    """Attend, write, and at a prompt's end keep: one layer of a step."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        **unused: Any,
    ):
        compat.check_layer(alibi_slopes, sliding_window, logits_soft_cap, attn_type, kv_sharing_target_layer_name)
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads
        self.scale = float(scale)
        self.runtime: Runtime = compat.runtime_of(get_current_vllm_config())

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Step | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query, output [tokens, query heads, d]; key, value [tokens, KV heads, d]. Writes and returns output."""
        runtime, step = self.runtime, attn_metadata
        if step is None or runtime.pool is None or runtime.tables is None:
            return output.fill_(0)
        index = compat.layer_index(layer.layer_name)
        first = index * self.num_kv_heads
        place = step.place[:, first : first + self.num_kv_heads]
        # Prompt chunks read what the request stored before this step, so they attend before anything is written.
        tokens = step.tokens
        scores = runtime.scores(index, key[:tokens], step)
        self._attend_chunks(step, first, query, key, value, scores, output)
        ops.kv_write(runtime.pool.pages, key[:tokens], value[:tokens], place)
        if scores is not None:
            runtime.tables.set_scores(place, scores)
        if runtime.page_selector and not runtime.admitter:  # which tells it of what leaves the window
            runtime.page_selector.note(place, key[:tokens], apart=not step.prefill)
        if step.decode_rows:
            rows = slice(0, step.decode_rows)
            self._attend_decodes(step, index, query[rows], output[rows])
            runtime.record_decodes(step, index, query[rows])
        for row in step.prefill:
            runtime.finish_layer(row, index, query[row.tokens], key[row.tokens], value[row.tokens])
        return output

    def _attend_decodes(self, step: Step, layer: int, query: torch.Tensor, output: torch.Tensor) -> None:
        """One-token rows, over what their requests store or select of it."""
        runtime = self.runtime
        assert runtime.tables is not None and runtime.pool is not None
        if runtime.selector:
            runtime.selector.select(step.row_slot, layer, query)
        if runtime.page_selector:
            attended = runtime.page_selector.select(step.row_slot, layer, query)
            if attended is not None:
                runtime.page_selector.attend(output, query, attended, self.scale)
                return
        tables = runtime.tables
        where = tables.directory, tables.chunks, step.row_slot, tables.lengths, layer * self.num_kv_heads
        ops.decode_attention(
            output, query, runtime.pool.pages, *where, self.num_kv_heads, self.scale, runtime.decode_plan
        )

    def _attend_chunks(
        self,
        step: Step,
        first: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: torch.Tensor | None,
        output: torch.Tensor,
    ) -> None:
        runtime, ring = self.runtime, self.runtime.policy.ring
        assert runtime.tables is not None and runtime.pool is not None
        if isinstance(step.prefill_plan, FlashPlan):
            pages = runtime.pool.pages
            flash_attention(output, query, key, value, pages, runtime.tables, step.prefill_plan, first, self.scale)
            return
        if isinstance(step.prefill_plan, SparsePlan):
            local, pages = runtime.policy.local, runtime.pool.pages
            assert local is not None and scores is not None
            new = output, query, key, value, local.admits(scores, step.position[:, None])
            sparse_attention(*new, pages, runtime.tables, step.prefill_plan, first, self.scale, local)
            return
        if step.prefill_plan is not None:
            tables, bounds = runtime.tables, (ring.sinks, ring.window) if ring else None
            where = (runtime.pool.pages, tables.directory, tables.chunks, tables.lengths, step.prefill_plan)
            ops.prefill_attention(output, query, key, value, *where, first, self.scale, bounds)
            return
        for row in step.prefill:
            chunk = row.tokens
            slots, counts = self._stored(row, first)
            stored = (*runtime.pool.gather(slots), counts) if row.stored else None
            gated = None if scores is None else self._gated(slots, scores[chunk], step.position[chunk])
            given = query[chunk], key[chunk], value[chunk], stored
            output[chunk] = chunk_attention(*given, row.start, ring, self.scale, gated)

    def _gated(self, slots: torch.Tensor, scores: torch.Tensor, position: torch.Tensor) -> Gated | None:
        """slots [KV heads, stored]; scores [tokens, KV heads] and position [tokens] of the chunk."""
        local, tables = self.runtime.policy.local, self.runtime.tables
        assert tables is not None
        if local is None:
            return None
        before = tables.positions.view(-1)[slots].long()
        stored = local.admits(tables.scores.view(-1)[slots], before)
        return Gated(local.tokens, before, stored, local.admits(scores.T, position))

    def _stored(self, row: PrefillRow, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token slots of a layer's heads before this step [KV heads, most], and how many tokens each head has."""
        tables = self.runtime.tables
        assert tables is not None
        heads = torch.arange(first, first + self.num_kv_heads)
        counts = torch.full((self.num_kv_heads,), row.stored)
        if self.runtime.policy.ring is None:  # heads may have been cut unlike; their lengths count the chunk already
            counts = tables.lengths[row.slot, heads].long() - (row.end - row.start)
        most = torch.arange(int(counts.max()))
        return tables.locate(row.slot, heads[:, None], torch.minimum(most, counts[:, None] - 1)), counts
