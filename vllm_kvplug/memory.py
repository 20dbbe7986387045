"""Device memory that a policy needs beside head pages, and what is left for them.

One set of formulas: the worker takes these bytes off what vLLM found free, and `kvplug plan` foretells them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch

from vllm_kvplug.components.redundancy import ROWS
from vllm_kvplug.cuts import AdmissionCuts, Cuts
from vllm_kvplug.kernels.hopper import PART_INTS
from vllm_kvplug.options import RequestOptions
from vllm_kvplug.placement.pool import COPY_BYTES
from vllm_kvplug.placement.tables import CHUNK, TableSizes
from vllm_kvplug.plan import PagePlan, ceil_div
from vllm_kvplug.policies.base import Policy
from vllm_kvplug.policies.from_host import FromHost
from vllm_kvplug.shape import PAGE, ModelShape
from vllm_kvplug.tiers.ledger import HOST_SLOT

SPLIT_WINDOWS = 4
"""Prompts split inside their query window at once that start-up reserves memory for; more are allocated."""

TILE_TOKENS, TILE_ROWS = 1 << 17, 32
"""Rows of queries that select are served together while they are so few, and have so many landmarks in a head."""

SELECTED_BYTES = 128
"""What selecting a token takes: where it is and goes, ranking of places included."""

RADIX_LEVELS, RADIX_DIGITS, RADIX_PARTS = 4, 256, 1024
"""Of the radix selection: passes, digits that each knows, and parts of heads that are counted by themselves."""

LISTED_TOKEN_BYTES = 32
"""Of a selected token on CUDA: that it is chosen, that it is new, and its row on the host, position and token slot."""

JUDGED_BYTES, LISTED_BYTES = 64, 160
"""What a cut takes for every token it looks at, sorting included, and for every page of a table it packs."""

COMPARED_BYTES, RANKED_BYTES, FETCHED_BYTES = 512 << 20, 44, 48
"""What drift checks compare at once, and take for a token of a pivot that is ranked, and for one that is fetched."""


@dataclass(frozen=True)
class Geometry:
    """What a rank holds: `layers` x `kv_heads`, the global index of its first KV head, and the limits of the engine."""

    layers: int
    kv_heads: int
    first_head: int
    query_heads: int
    head_dim: int
    dtype: torch.dtype
    scale: float
    max_requests: int
    max_tokens: int
    page_dtype: torch.dtype

    @classmethod
    def of_rank(
        cls,
        shape: ModelShape,
        rank: int,
        dtype: torch.dtype,
        max_requests: int,
        max_tokens: int,
        page_dtype: torch.dtype | None = None,
    ) -> Self:
        """dtype: of the model; page_dtype: of its KV cache, the same if None."""
        heads = shape.rank_heads(rank)
        return cls(
            layers=shape.layers,
            kv_heads=len(heads),
            first_head=heads.start,
            query_heads=shape.query_heads // shape.tensor_parallel,
            head_dim=shape.head_dim,
            dtype=dtype,
            scale=shape.head_dim**-0.5,
            max_requests=max_requests,
            max_tokens=max_tokens,
            page_dtype=page_dtype or dtype,
        )

    @property
    def heads(self) -> int:
        return self.layers * self.kv_heads

    @property
    def head_range(self) -> range:
        return range(self.first_head, self.first_head + self.kv_heads)

    def flat(self, layer: int, head: int) -> int:
        """A global KV head of this rank, counted over layers as tables do."""
        return layer * self.kv_heads + head - self.first_head

    @property
    def block_bytes(self) -> int:
        """Bytes of a vLLM block over all layers."""
        return self.heads * PAGE * 2 * self.head_dim * self.page_dtype.itemsize

    def table_sizes(self, blocks: int, policy: Policy[Any]) -> TableSizes:
        return TableSizes(self.max_requests, self.heads, self.max_tokens, blocks, policy.gated)


@dataclass(frozen=True)
class Charges:
    """Bytes of a rank beside head pages. All but `per_block` do not depend on the size of the pool."""

    tables: int = 0
    queries: int = 0
    staging: int = 0
    workspace: int = 0
    per_block: int = 0

    @property
    def fixed(self) -> int:
        return self.tables + self.queries + self.staging + self.workspace

    def pool_bytes(self, available: int, block_bytes: int) -> int:
        """What is left of `available` bytes for head pages; negative if there is not enough."""
        return (available - self.fixed) * block_bytes // (block_bytes + self.per_block)


def charges(policy: Policy[Any], geometry: Geometry, max_batch: int, plan_bytes: int, decode_rows: int = 0) -> Charges:
    """What an engine with this policy needs on a rank.

    max_batch: tokens of a step. plan_bytes: of the decode kernel's plan; decode_rows: of a decode step, padding
    included. Both are 0 on the CPU, which needs no such plans.
    """
    sizes = geometry.table_sizes(0, policy)
    scratch = policy.gate_scratch(geometry.kv_heads, geometry.dtype.itemsize, cuda=plan_bytes > 0)
    places = max_batch * (8 * geometry.heads + policy.gate_columns(geometry.kv_heads) * geometry.dtype.itemsize)
    windows = recent_query_bytes if policy.shares_budget else query_window_bytes
    return Charges(
        tables=sizes.fixed_bytes()
        + bound_bytes(policy, geometry)
        + places
        + plan_bytes
        + selecting_table_bytes(policy, geometry)
        + line_bytes(policy, geometry, decode_rows),
        queries=windows(policy.query_window, geometry) + pivot_bytes(policy, geometry),
        staging=staging_tokens(policy, geometry) * 2 * geometry.head_dim * geometry.dtype.itemsize,
        workspace=workspace_bytes(policy, geometry, decode_rows > 0)
        + drift_bytes(policy, geometry)
        + max_batch * scratch,
        per_block=sizes.bytes_per_block()
        + geometry.heads * bound_bytes(policy, geometry)
        + (line_bytes_per_block(policy, geometry) if decode_rows else 0),
    )


def decode_plan_bytes(geometry: Geometry, rows: int, multiprocessors: int) -> int:
    """The decode kernel's plan on a Hopper GPU (kernels/hopper.py): what each block works on, and partial results.

    rows: requests of a step, padding included.
    """
    g, items = geometry, rows * geometry.kv_heads
    partial = 2 * g.query_heads // g.kv_heads * (g.head_dim + 2)
    return 4 * (g.layers * (PART_INTS * multiprocessors + items + 1) + multiprocessors * partial + items)


def query_window_bytes(window: int, geometry: Geometry) -> int:
    """The newest query of every request and of padding rows, and the windows of prompts that are split inside them."""
    return (geometry.max_requests + 1 + SPLIT_WINDOWS * window) * query_bytes(geometry) if window else 0


def recent_query_bytes(window: int, geometry: Geometry) -> int:
    """The newest queries of every request and of padding rows, where they score answers."""
    return (geometry.max_requests + 1) * window * query_bytes(geometry)


def query_bytes(geometry: Geometry) -> int:
    """A token's queries in all layers."""
    return geometry.layers * geometry.query_heads * geometry.head_dim * geometry.dtype.itemsize


def pivot_bytes(policy: Policy[Any], geometry: Geometry) -> int:
    """Every request's queries of pivots: a drift window of them, and one that made the baseline."""
    if policy.retrieval is None:
        return 0
    pivots = sum(cluster.pivot in geometry.head_range for cluster in policy.retrieval.clusters)
    one = pivots * (geometry.query_heads // geometry.kv_heads) * geometry.head_dim * geometry.dtype.itemsize
    return (geometry.max_requests + 1) * (policy.retrieval.window + 1) * one


def staging_tokens(policy: Policy[Any], geometry: Geometry) -> int:
    """Room for a fetch of all clusters of this rank at the longest prompt, and for two of the largest one."""
    if policy.retrieval is None:
        return 0
    plan = policy.plan()
    assert isinstance(plan, PagePlan)
    kept = plan.kept(geometry.max_tokens)
    clusters = policy.retrieval.clusters
    tokens = [sum(kept[c.layer][h] for h in c.satellites if h in geometry.head_range) for c in clusters]
    return max(sum(tokens), 2 * max(tokens))


def drift_bytes(policy: Policy[Any], geometry: Geometry) -> int:
    """What drift checks take beside the model: scores of all pivots, their ranking, and what some of them compare. And
    where fetched tokens go, come from and stand."""
    if policy.retrieval is None:
        return 0
    pivots = sum(cluster.pivot in geometry.head_range for cluster in policy.retrieval.clusters)
    at_once = pivots_at_once(geometry, policy.retrieval.window, geometry.max_tokens, in_pages=False)
    compared = min(at_once, pivots) * geometry.max_tokens * _compared_bytes(geometry, policy.retrieval.window)
    ranked = pivots * geometry.max_tokens * RANKED_BYTES
    return ranked + compared + staging_tokens(policy, geometry) * FETCHED_BYTES


def pivots_at_once(geometry: Geometry, window: int, tokens: int, in_pages: bool) -> int:
    """How many pivots a drift check compares together, whose prompt has so many tokens. in_pages: where keys stay."""
    return max(COMPARED_BYTES // (tokens * _compared_bytes(geometry, window, in_pages)), 1)


def _compared_bytes(geometry: Geometry, window: int, in_pages: bool = False) -> int:
    """For a token of a pivot's prompt: its key, as it is stored and in float32, and every query's score of it."""
    group = geometry.query_heads // geometry.kv_heads
    if in_pages:
        return (window + 1) * (4 * group + 24)
    return geometry.head_dim * (geometry.dtype.itemsize + 4) + 24 + (window + 1) * (12 * group + 24)


def workspace_bytes(policy: Policy[Any], geometry: Geometry, in_lines: bool) -> int:
    """Transient memory that vLLM's profile run does not see: of one layer's prompt attention and scoring, of a cut that
    judges tokens, or of one that packs what stays. One of them is alive at a time.

    in_lines: whether decode rows select in lines, which are charged apart.
    """
    g = geometry
    attending = 4 * g.kv_heads * g.max_tokens * g.head_dim * g.dtype.itemsize
    selecting = 0 if in_lines else page_selecting_bytes(policy, g)
    if not policy.evicts:
        return max(attending, selecting)
    attending += 8 * g.query_heads * max(policy.query_window, 1) * g.max_tokens
    selecting = max(selecting, selecting_bytes(policy, g, in_lines))
    return max(attending, selecting, packing_bytes(g), judging_bytes(policy, g))


def packing_bytes(geometry: Geometry) -> int:
    """The pages that any head may have, in a rectangle, and those that move, some at a time."""
    blocks = ceil_div(geometry.max_tokens, PAGE)
    return blocks * geometry.heads * LISTED_BYTES + min(blocks * geometry.block_bytes, COPY_BYTES)


def judging_bytes(policy: Policy[Any], geometry: Geometry) -> int:
    """A rectangle of all heads' tokens that one cut judges, and K and V of one layer's part of it."""
    if not policy.shares_budget:
        return 0
    g = geometry
    served = [policy]
    if policy.config.request_knob:  # a request with a larger budget may have a larger window
        served.append(policy.for_request(RequestOptions(budget=policy.config.max_request_budget)))
    tokens = max(_judged_tokens(one.cuts(g.max_tokens), g.max_tokens) for one in served)
    scored = scoring_bytes(g.head_dim) if policy.query_window else 0
    return tokens * (g.heads * JUDGED_BYTES + g.kv_heads * (2 * g.head_dim * g.dtype.itemsize + scored))


def scoring_bytes(head_dim: int) -> int:
    """What scoring a stored token takes in one head: its key in float32, and comparing some keys with all at a time."""
    return 4 * 2 * head_dim + 20 * ROWS


def _judged_tokens(cuts: Cuts, most: int) -> int:
    """A prompt's cut looks at what came in since the last one's window; an answer's, or a cap, at everything."""
    everything = cuts.bounded if isinstance(cuts, AdmissionCuts) else cuts.decode
    return most if everything else min(cuts.every + cuts.window, most)


def selecting_table_bytes(policy: Policy[Any], geometry: Geometry) -> int:
    """By request and for padding rows: counts, blocks of landmarks, and slots on the host."""
    if not isinstance(policy, FromHost):
        return 0
    lists = ceil_div(geometry.max_tokens, policy.landmark_pages.tokens), ceil_div(geometry.max_tokens, HOST_SLOT)
    return (geometry.max_requests + 1) * (4 * geometry.heads + sum(lists)) * 8


def selecting_bytes(policy: Policy[Any], geometry: Geometry, in_lines: bool) -> int:
    """One layer: making the longest prompt's landmarks, or a tile of rows that select where they do not in lines."""
    if not isinstance(policy, FromHost):
        return 0
    g, landmarks = geometry, policy.landmark_pages
    making = hosting_bytes(policy, g) if policy.shares_budget else _making_bytes(policy, g)
    if in_lines:
        return making
    most, rows = policy.most_landmarks(g.max_tokens), min(TILE_ROWS, g.max_requests)
    longest = ceil_div(most, landmarks.tokens) * landmarks.tokens
    tokens = max(longest, min(TILE_TOKENS, rows * longest))
    copies = landmarks.format.page_copies * landmarks.page_bytes // landmarks.tokens
    selected = policy.most_selected(tokens) + rows * policy.config.min_tokens
    scored = tokens * (g.kv_heads * (copies + 44) + 8 * g.query_heads) + selected * g.kv_heads * SELECTED_BYTES
    return max(making, scored + rows * g.query_heads * landmarks.format.query_bytes)


def _making_bytes(policy: FromHost[Any], geometry: Geometry) -> int:
    """Landmarks of all tokens, of one layer."""
    g = geometry
    copies = g.dtype.itemsize + policy.landmark_pages.format.float_copies
    return g.kv_heads * g.max_tokens * (4 * g.head_dim * copies + 32)


def hosting_bytes(policy: FromHost[Any], geometry: Geometry) -> int:
    """The end of the longest prompt whose heads share a budget: of one layer, the tokens to choose from and a copy of
    those that move, and what goes to the host; landmarks of all layers, which wait for pages to be packed.
    """
    g, landmarks = geometry, policy.landmark_pages
    most = policy.most_landmarks(g.max_tokens)
    waiting = g.heads * ceil_div(most, landmarks.tokens) * landmarks.page_bytes
    moving = g.max_tokens * (JUDGED_BYTES + 2 * g.head_dim * g.page_dtype.itemsize)
    leaving = most * 4 * 2 * g.head_dim * g.dtype.itemsize
    return waiting + max(g.kv_heads * (moving + leaving), packing_bytes(g))


def bound_bytes(policy: Policy[Any], geometry: Geometry) -> int:
    """The bounds of a page's keys."""
    return 2 * geometry.head_dim * geometry.dtype.itemsize if policy.page_selection is not None else 0


def page_selecting_bytes(policy: Policy[Any], geometry: Geometry) -> int:
    """One layer: bounds, ids and scores of a tile's pages, and tables of the pages that all rows attend to."""
    if policy.page_selection is None:
        return 0
    g, longest = geometry, ceil_div(geometry.max_tokens, PAGE)
    tile = max(longest, min(TILE_TOKENS // PAGE, g.max_requests * longest))
    scored = g.kv_heads * (2 * bound_bytes(policy, g) + 4 * 2 * g.head_dim + 64) + 8 * g.query_heads
    return tile * scored + g.max_requests * g.kv_heads * 24 * (policy.attended_pages(g.max_tokens) + CHUNK)


def line_bytes(policy: Policy[Any], geometry: Geometry, rows: int) -> int:
    """On CUDA, for every row of a step that selects: numbers and tables, and room for the selection itself."""
    if not (policy.selects and rows):
        return 0
    g = geometry
    if policy.page_selection is not None:
        longest = ceil_div(g.max_tokens, PAGE)
        own = 6 * (rows + 1) + 1 + rows * g.kv_heads * (ceil_div(longest, CHUNK) + CHUNK + 2)
        if policy.local is not None:  # heads are unlike: what they have does not follow from blocks
            own += rows * g.kv_heads * longest * 3
    else:
        sums = 2 * max(rows * g.kv_heads, RADIX_PARTS) * (g.query_heads // g.kv_heads)
        own = 4 * ceil_div(rows, 4) * 4 * g.heads + 2 * (rows + 1) + 1 + rows * g.query_heads * g.head_dim + sums
    return 4 * own + radix_bytes(g, rows)


def line_bytes_per_block(policy: Policy[Any], geometry: Geometry) -> int:
    """Of every head of a layer: for a page to select, its score, its id and a place in a table; for one of landmarks,
    scores of the group's queries and what they make, and for one of tokens, which are chosen and where they come from.
    """
    g = geometry
    if policy.page_selection is not None:
        return 12 * g.kv_heads if policy.local is None else 0
    if not isinstance(policy, FromHost):
        return 0
    return 4 * policy.landmark_pages.tokens * (g.query_heads + g.kv_heads) + g.kv_heads * PAGE * LISTED_TOKEN_BYTES


def radix_bytes(geometry: Geometry, rows: int) -> int:
    """Of the radix selection on CUDA (kernels/top_tokens.py): counts of digits of every part of a head."""
    items = rows * geometry.kv_heads
    return 4 * RADIX_LEVELS * (max(items, RADIX_PARTS) * (RADIX_DIGITS + 1) + 2 * items)
