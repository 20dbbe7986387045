"""Requests with options of their own: as an engine is asked, and the rules of the reference that they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine_tools import Ask, runtime, scheduler, token_ids
from reference import Rule, SnapKV
from reference_gated import Knorm

from benchmarks.engine import used_blocks

EVERYTHING = {"logprobs": -1}
SNAPKV_KNOBS = {"ratio": 0.3, "window": 16}
KNORM_KNOBS = {"ratio": 0.3, "window": 16, "cut_every": 48}


@dataclass(frozen=True)
class AskedSnapKV(SnapKV):
    protect: tuple[tuple[int, int], ...] = ()
    context_end: int | None = None


@dataclass(frozen=True)
class AskedKnorm(Knorm):
    protect: tuple[tuple[int, int], ...] = ()
    context_end: int | None = None


def snapkv(**fields: Any) -> AskedSnapKV:
    return AskedSnapKV(**{**SNAPKV_KNOBS, **fields})


def knorm(**fields: Any) -> AskedKnorm:
    return AskedKnorm(**{"ratio": 0.3, "window": 16, "every": 48, **fields})


@dataclass(frozen=True)
class Member:
    """One request of a batch: its prompt's length, its options, and the rule that they make."""

    length: int
    options: Mapping[str, Any]
    rule: Rule

    @property
    def prompt(self) -> list[int]:
        return token_ids(self.length, 7)

    def ask(self, steps: int, **more: Any) -> Ask:
        sampling = {"extra_args": {f"kvplug.{name}": value for name, value in self.options.items()}}
        return Ask(self.prompt, steps, sampling={**sampling, **more})


def assert_idle(llm: Any) -> None:
    """Nothing of any request is left: blocks, tables, windows, host slots, staging, fetches."""
    state, manager = runtime(llm), scheduler(llm)._head_pages
    assert used_blocks(llm) == 0 and not llm.llm_engine.has_unfinished_requests()
    assert not state.live and not state.windows._kept
    assert sorted(state._free_slots) == list(range(state.geometry.max_requests))
    assert int(state.tables._num_free) == state.tables.sizes.chunks
    assert not manager.req_to_blocks and not manager._admitted and not manager.host._reserved
    if state.offloader:
        assert state.offloader.host.used == 0
    if state.retriever:
        assert not state.retriever.staging._taken
        assert not any(flight.pieces for flight, *_ in state.retriever._held_back)
