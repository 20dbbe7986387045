"""The contract of a policy.

A policy is one file: a frozen config, and a class that says what every head keeps and how tokens are
ranked. It sees lengths, queries and keys; it never touches vLLM objects, blocks or pages.
"""

from __future__ import annotations

import copy
from abc import ABC
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import torch
from pydantic import ValidationError

from vllm_kvplug.config import PolicyConfig
from vllm_kvplug.cuts import Cuts
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.options import OptionError, RequestOptions
from vllm_kvplug.plan import Kept, LayerPlan, PagePlan, Plan, SharedPlan
from vllm_kvplug.shape import ModelShape
from vllm_kvplug.tiers.codecs import CodecName, token_bytes
from vllm_kvplug.tiers.ledger import HOST_SLOT, host_slots

GIB = 1 << 30

ConfigT = TypeVar("ConfigT", bound=PolicyConfig)


@dataclass(frozen=True)
class Ring:
    """A head that sees its first `sinks` tokens and its last `window` tokens, and stores no others."""

    sinks: int
    window: int

    @property
    def tokens(self) -> int:
        return self.sinks + self.window


@dataclass(frozen=True)
class LocalWindow:
    """Heads see their last `tokens` tokens, and of older ones those that the gate scored above `threshold`.

    sinks: first tokens that count as such whatever their score. deferred: decoded tokens are scored a window at a time,
    from the keys that are stored, before the first of them leaves it.
    """

    tokens: int
    threshold: float
    sinks: int = 0
    deferred: bool = False

    def admits(self, scores: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Which tokens with these scores, at these positions, are seen from beyond the window; broadcasts."""
        return (scores > self.threshold) | (position < self.sinks)


@dataclass(frozen=True)
class PromptView:
    """What a scorer sees of one layer when a prompt is complete, or of a request at a cut of its answer.

    queries: [window, query heads of the rank, head_dim], the last queries after RoPE, oldest
        first; window is the policy's `query_window`, or the whole prompt where that is shorter.
    keys: [KV heads of the rank, tokens, head_dim], after RoPE, of what each head stores, in order.
    layer: index of the layer. heads: global index of each KV head of the rank. scale: softmax scale.
    values: as keys. counts: int64 [KV heads of the rank], how many of `tokens` each head has where they are unlike:
    what lies behind these is nobody's, and may be NaN. None: all of them.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    layer: int
    heads: range
    scale: float
    values: torch.Tensor
    counts: torch.Tensor | None = None


@dataclass(frozen=True)
class Cluster:
    """A pivot and the satellites that attend alike, global KV heads of one layer."""

    layer: int
    pivot: int
    satellites: tuple[int, ...]


@dataclass(frozen=True)
class Retrieval:
    """Satellites' prompts live on the host, and tokens come back when their pivot's attention drifts.

    clusters: ascending by layer. threshold, window: a drift check every `window` decoded tokens asks whether the
    median overlap of that many queries' top tokens with the baseline's is below the threshold. kernel: average
    pool over scores. land_after: steps from the trigger to the first step that sees what it fetched.
    codec: of host memory. step_mib: fetched MiB a step may take, None for no limit. as_released: fetch what the
    released code fetches.
    """

    clusters: tuple[Cluster, ...]
    threshold: float
    window: int
    kernel: int
    land_after: int
    codec: CodecName
    step_mib: float | None
    as_released: bool


@dataclass(frozen=True)
class PageSelection:
    """Decode queries attend to whole pages of 16 tokens, chosen by the bounds of their keys.

    dense_layers: first layers whose queries attend to everything. local_pages: first pages of every head, of which each
    query attends to all: a local window's.
    """

    dense_layers: int
    local_pages: int = 0


class Gate(Protocol):
    """Scores every token once, when its K and V are written; made for the KV heads of one rank."""

    def rows(self, layer: int) -> torch.Tensor | None:
        """[gate_columns, hidden size]: `score` wants its product with what enters the layer's attention; or None."""

    def score(
        self, layer: int, key: torch.Tensor, position: torch.Tensor, projected: torch.Tensor | None
    ) -> torch.Tensor:
        """Higher is kept: float32 [tokens, KV heads].

        key: the layer's new keys [tokens, KV heads, d], after RoPE. position: of the tokens, int64 [tokens].
        projected: [tokens, gate_columns]. Runs inside captured graphs: no host synchronisation, and shapes that follow
        from those of its arguments alone.
        """


class Policy(ABC, Generic[ConfigT]):
    """One named filling of the slots admission, selection, eviction and offload.

    `ring` bounds what is stored and seen at all times (admission). Otherwise the prompt is stored whole, or cut down
    (eviction). A class that overrides `kept` has it cut once, when it is complete: every head keeps the
    `kept(n)[layer][head]` tokens that `score` ranks highest. A class that overrides `cuts` and `make_gate` has it cut
    as it comes in, and its heads share one budget: the tokens that the gate scored highest stay, whichever heads they
    are of. One that overrides `cuts` and `score` has all that is stored scored anew at the cuts of the answer; its
    other cuts drop nothing. With a `local` window as well as a gate (admission) the gate's threshold decides what is
    seen and stored beyond it, and the cuts only cap that; if it overrides `score` too, that chooses within a
    budget (admission and eviction). Decoded tokens are kept, unless cuts go on. With a `retrieval`, satellites that
    were cut get other prompt tokens back from the host later (offload). Where a class `selects`, every decode query
    attends to stored or offloaded tokens of its own choice (selection); whole pages, with a `page_selection`.

    An object serves requests with one set of options. What depends on the budget must be computed from
    `self.config` when asked: `for_request` makes an object with another config.
    """

    name: ClassVar[str]
    Config: ClassVar[type[PolicyConfig]] = PolicyConfig
    uses_host_tier: ClassVar[bool] = False
    selects: ClassVar[bool] = False
    ring: Ring | None = None
    local: LocalWindow | None = None
    query_window: int = 0
    retrieval: Retrieval | None = None
    page_selection: PageSelection | None = None
    options: RequestOptions = RequestOptions()

    def __init__(self, config: ConfigT, shape: ModelShape):
        """Raises PolicyError if the config cannot work for a model of this shape."""
        self.config = config
        self.shape = shape

    def kept(self, prompt_len: int) -> Kept:
        """Tokens each head keeps of a prompt of `prompt_len` >= 1 tokens, [layers][kv_heads].

        Each value is in 1..prompt_len. Protected tokens come on top where they do not fit in it.
        """
        raise NotImplementedError

    def score(self, view: PromptView) -> torch.Tensor:
        """Rank of every token for every head, float32 [KV heads of the rank, tokens].

        Higher is kept; +inf is kept before all others; ties go to the earlier token.
        """
        raise NotImplementedError

    def cuts(self, prompt_len: int) -> Cuts:
        """When a prompt of `prompt_len` >= 1 tokens is cut, and to what; the engine adds what is protected."""
        raise NotImplementedError

    def make_gate(self, heads: range, dtype: torch.dtype, device: torch.device) -> Gate:
        """The scorer of a policy with `cuts`, for these global KV heads of every layer and a model in `dtype`."""
        raise NotImplementedError

    def gate_columns(self, heads: int) -> int:
        """Columns of what a gate for so many KV heads a layer makes of hidden states; 0 if it wants none."""
        return 0

    def gate_scratch(self, heads: int, itemsize: int, cuda: bool) -> int:
        """Bytes a token that a gate for so many KV heads a layer takes while it scores, in a model of that itemsize."""
        return 0

    def drift_tokens(self, prompt_len: int) -> int:
        """Size of the token sets that drift checks compare; only with a `retrieval`."""
        raise NotImplementedError

    def attended_pages(self, tokens: int) -> int:
        """Pages that a decode query attends to, of a request of `tokens` tokens; only with a `page_selection`."""
        raise NotImplementedError

    def check_budget(self) -> None:
        """Raises PolicyError if the budget in `config` cannot be met by any prompt."""

    def check_prompt(self, prompt_len: int) -> None:
        """Raises OptionError if `options` do not go with a prompt of `prompt_len` tokens to cut."""
        if self.options.scores is not None:
            raise OptionError(f"policy '{self.name}' takes no scores of others: remove kvplug.scores")

    @property
    def shares_budget(self) -> bool:
        """Whether heads share a budget; of the class, whatever a request's options are."""
        return type(self).cuts is not Policy.cuts

    @property
    def shares_layers(self) -> bool:
        """Whether heads of a layer of a rank share the sum of what `kept` gives them, the best scores first."""
        return False

    @property
    def gated(self) -> bool:
        """Whether tokens are scored once, when they come in."""
        return type(self).make_gate is not Policy.make_gate

    @property
    def judges_answers(self) -> bool:
        """Whether the gate's scores of decoded tokens are ever looked at; of all requests alike. Only if `gated`."""
        return self.local is not None or self.cuts(1).decode is not None

    @property
    def evicts(self) -> bool:
        """Whether prompts are cut down."""
        return (self.shares_budget or type(self).kept is not Policy.kept) and not self.options.off

    def plan(self) -> Plan:
        return self._plan

    @cached_property
    def _plan(self) -> Plan:
        if self.evicts and self.shares_budget:
            return SharedPlan(self.shape, self._cuts_with_protected)
        kept = self._kept_with_protected if self.evicts else None
        if kept and self.shares_layers:
            return LayerPlan(self.shape, kept)
        return PagePlan(self.shape, kept, self.ring.tokens if self.ring else None)

    def _cuts_with_protected(self, prompt_len: int) -> Cuts:
        cuts = self.cuts(prompt_len)
        return replace(cuts, protect=self.options.protecting(*cuts.protect).protect)

    def _kept_with_protected(self, prompt_len: int) -> Kept:
        kept, least = self.kept(prompt_len), self.options.protected(prompt_len)
        return [[max(count, least) for count in layer] for layer in kept] if least else kept

    def for_request(self, options: RequestOptions) -> Self:
        """The policy as it serves a request with `options`; OptionError if it cannot."""
        return self if options == self.options else _for_request(self, options)

    def _for_request(self, options: RequestOptions) -> Self:
        refused = options.given() if self.ring is not None else []
        if self.local is not None:
            refused = [key for key in options.given() if key != "kvplug.protect"]
        if refused:
            raise OptionError(f"policy '{self.name}' has one ring for all: remove {', '.join(refused)}")
        asked = 1.0 if options.off else options.budget
        if asked is not None and asked > self.config.max_request_budget:
            limit = self.config.max_request_budget
            raise OptionError(f"this server allows a kvplug.budget of at most {limit}, and no kvplug.off below 1")
        served = copy.copy(self)
        served.options = options
        vars(served).pop("_plan", None)
        if options.budget is not None:
            served.config = self._config_for(options.budget)
            try:
                served.check_budget()
            except PolicyError as error:
                raise OptionError(f"kvplug.budget {options.budget}: {error}") from None
        return served

    def _config_for(self, budget: float) -> ConfigT:
        if self.config.request_knob is None:
            raise OptionError(f"policy '{self.name}' has no budget that a request could change: remove kvplug.budget")
        try:
            return self.config.for_budget(budget)
        except ValidationError as error:
            raise OptionError(f"kvplug.budget {budget}: {error.errors()[0]['msg']}") from None

    def offloaded(self, prompt_len: int, heads: range) -> list[tuple[int, int]]:
        """(layer, global head) of the heads in `heads` whose prompt of `prompt_len` tokens goes to the host."""
        if self.retrieval is None or not self.evicts:
            return []
        plan = self.plan()
        assert isinstance(plan, PagePlan)
        kept = plan.kept(prompt_len)
        return [
            (cluster.layer, head)
            for cluster in self.retrieval.clusters
            for head in cluster.satellites
            if head in heads and kept[cluster.layer][head] < prompt_len
        ]

    def host_slots(self, prompt_len: int) -> int:
        """Host slots that the neediest rank reserves for a prompt of `prompt_len` tokens.

        If any satellite is cut, room for all of them: it must not fall as the prompt grows, since a request that the
        door let in for its longest self may begin anew at any length below that.
        """
        if self.retrieval is None or not self.offloaded(prompt_len, range(self.shape.kv_heads)):
            return 0
        satellites = [head for cluster in self.retrieval.clusters for head in cluster.satellites]
        ranks = (self.shape.rank_heads(rank) for rank in range(self.shape.tensor_parallel))
        return max(host_slots(sum(head in heads for head in satellites), prompt_len) for heads in ranks)

    @property
    def offloads(self) -> bool:
        """Whether the engine has a host tier."""
        return self.retrieval is not None

    def host_slot_bytes(self, itemsize: int) -> int:
        """Bytes of a host slot, for an engine whose K and V have `itemsize` bytes; only if it `offloads`."""
        assert self.retrieval is not None
        return HOST_SLOT * token_bytes(self.retrieval.codec, self.shape.head_dim, itemsize)

    def host_capacity(self, itemsize: int) -> int:
        """Host slots of each rank's pool."""
        return int(self.config.host_gib * GIB) // self.host_slot_bytes(itemsize) if self.offloads else 0

    def summary(self) -> str:
        """One line for the log: the resolved budget in words."""
        return ", ".join(f"{k}={v}" for k, v in self.config.model_dump(exclude_none=True).items())


@lru_cache(maxsize=16)
def _for_request(policy: Policy[Any], options: RequestOptions) -> Any:
    """The last few, with what their plans have computed: a request that waits is looked at in every step."""
    return policy._for_request(options)
