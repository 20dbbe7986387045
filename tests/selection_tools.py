"""Requests that select from the host, held to their reference step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from engine_tools import ROUNDING, Answer, Ask, Snapshot, Watch, runtime, scheduler, serve
from reference import Reference, Replay
from reference_hosted import Hosted, Selection, WGKVYakv
from reference_yakv import Selecting

from vllm_kvplug.placement.integrity import kept_positions
from vllm_kvplug.tiers.ledger import HOST_SLOT

WORST = ROUNDING if torch.version.cuda is None else 10 * ROUNDING
"""As ROUNDING, where that bounds the median step alone: vLLM makes its table of rotary positions on the GPU, and with
angles that float32 rounds otherwise log-probabilities behind 500 tokens are up to 3e-4 away."""

Stored = Sequence[tuple[torch.Tensor, torch.Tensor]]


class WatchStored(Watch):
    """stored: of each request that selects, what the host gives back of its prompt, by layer: K and V [H, n, d]."""

    def __init__(self, llm: Any, **what: Any):
        super().__init__(llm, **what)
        self.stored, selector = dict[str, Stored](), self.runtime.selector
        ready = selector._ready

        def watched(request: Any, *given: Any) -> None:
            ready(request, *given)
            (name,) = [name for name, live in self.runtime.live.items() if live is request]
            self.stored[name] = self._from_host(request)

        selector._ready = watched

    def seen(self, answer: Answer) -> tuple[list[Snapshot], Stored]:
        """What `check_steps` wants to know of a request."""
        return self.snapshots[answer.request_id], self.stored.get(answer.request_id, ())

    def _from_host(self, request: Any) -> Stored:
        selector, selected, g = self.runtime.selector, request.selected, self.runtime.geometry
        if selected.stored is not None:
            selected.stored.wait()
        if selector.tables.lengths.is_cuda:
            torch.cuda.synchronize()
        number = torch.arange(selected.layout.landmarks if selector.base else request.prefill_end)
        slots = selected.slots[number // HOST_SLOT] * g.heads + torch.arange(g.heads)[:, None]
        rows = selector.host.rows[slots * HOST_SLOT + number % HOST_SLOT]
        key, value = selector.host.codec.decode(rows).float().split(g.head_dim, -1)
        return list(zip(key.split(g.kv_heads), value.split(g.kv_heads), strict=True))


def check_steps(
    reference: Reference,
    rule: Selecting | Hosted | WGKVYakv,
    prompt: list[int],
    answer: Answer,
    snapshots: Sequence[Snapshot],
    host: Stored = (),
) -> Replay:
    """Asserts that every step saw the reference's tokens in every head and gave its distribution.

    host: what the engine's gave back, which is held to the reference's, and taken: a value in the middle of two codes
    may get either, and with another code all that comes after is another.
    """
    stored = {s.length: s.kept for s in snapshots}
    given = replace(rule, engine=stored, host=host)
    replay = reference.replay(prompt, given, len(answer.tokens), force_tokens=answer.tokens)
    strange = getattr(replay.watcher, "strange", [])
    assert not strange, f"(layer, V not K, head, token) on the host: {len(strange)} differ, first {strange[:5]}"
    for length in sorted(replay.kept.keys() & stored.keys()):
        for layer, heads in enumerate(replay.kept[length]):
            for head, theirs in enumerate(heads):
                ours = set(stored[length][layer][head])
                if ours != set(theirs):
                    margin = getattr(replay.watcher, "margins", {}).get((length, layer, head))
                    place = f"length {length} layer {layer} head {head}"
                    raise AssertionError(f"{place}: {ours ^ set(theirs)}, by a margin of {margin}")
    error = (answer.logprobs - replay.logits.log_softmax(-1)).abs().amax(1)
    assert error.median() <= ROUNDING and error.max() <= WORST, error
    return replay


def serve_with_slots(llm: Any, asks: Sequence[Ask], slots: int) -> list[Answer]:
    """Answers of an engine whose host tier has so few slots that requests have to wait."""
    manager, waits = scheduler(llm)._head_pages, []
    assert manager.host.capacity == runtime(llm).selector.host.slots == slots

    def look() -> None:
        waits.extend(not manager.host.fits(manager._host_slots(r.request_id)) for r in scheduler(llm).waiting)

    answers = serve(llm, asks, look)
    assert any(waits), "nobody had to wait"
    return answers


class WatchHosted(WatchStored):
    """Snapshots have positions where page tables have numbers on the host.

    hosted: of each request, the positions of what is on the host for every head, once its prompt is complete.
    """

    def __init__(self, llm: Any, **what: Any):
        super().__init__(llm, **what)
        self.hosted = dict[str, list[list[int]]]()
        cutter, selector = self.runtime.cutter or self.runtime.admitter, self.runtime.selector
        ready, survivors = selector.ready, {}

        def note(request: Any, lengths: Any) -> Any:
            tables, slot = self.runtime.tables, request.slot
            before = tables.lengths[slot].clone()
            tables.lengths[slot] = lengths.int()
            survivors[slot] = kept_positions(tables, slot)
            tables.lengths[slot] = before
            return lengths

        def watched_give_back(request: Any, end: int, lengths: Any, left: int) -> None:
            give_back(request, end, note(request, lengths), left)

        if self.runtime.admitter:
            give_back, cutter._give_back = cutter._give_back, watched_give_back
        else:
            judge = cutter._judge
            cutter._judge = lambda request, cut: note(request, judge(request, cut))

        def watched_ready(request: Any, *given: Any) -> None:
            ready(request, *given)
            (name,) = [name for name, live in self.runtime.live.items() if live is request]
            stays = kept_positions(self.runtime.tables, request.slot)
            pairs = zip(survivors[request.slot], stays, strict=True)
            self.hosted[name] = [sorted(set(all_of) - set(some)) for all_of, some in pairs]

        selector.ready = watched_ready

    def seen(self, answer: Answer) -> tuple[list[Snapshot], Stored]:
        snapshots, stored = super().seen(answer)
        return [replace(s, kept=self._positions(answer, s)) for s in snapshots], stored

    def _positions(self, answer: Answer, snapshot: Snapshot) -> list[list[list[int]]]:
        base, heads = self.runtime.selector.base, len(snapshot.kept[0])

        def of_head(layer: int, head: int) -> list[int]:
            kept = snapshot.kept[layer][head]
            numbers = [t - base for t in kept if t >= base]
            hosted = self.hosted[answer.request_id][layer * heads + head] if numbers else []
            return sorted([t for t in kept if t < base] + [hosted[number] for number in numbers])

        return [[of_head(layer, head) for head in range(heads)] for layer in range(len(snapshot.kept))]


def check_hosted(
    reference: Reference, rule: Hosted | WGKVYakv, prompt: list[int], answer: Answer, watch: WatchHosted
) -> Replay:
    """As `check_steps`; and what was kept and hosted at the prompt's end."""
    snapshots, stored = watch.seen(answer)
    replay = check_steps(reference, rule, prompt, answer, snapshots, stored)
    (complete,) = [s for s in snapshots if s.length == s.prompt_end]
    hosted = replay.watcher.hosted if isinstance(replay.watcher, Selection) else None
    mine = watch.hosted.get(answer.request_id)
    assert (mine is None) == (hosted is None)
    survivors = replay.kept_in_prompt[complete.length]
    if hosted is None:
        assert complete.kept == survivors
        return replay
    assert mine == [head for layer in hosted for head in layer]
    for layer, heads in enumerate(survivors):
        for head, theirs in enumerate(heads):
            stays = set(theirs) - set(hosted[layer][head])
            there = hosted[layer][head]
            newest = there[len(there) - replay.watcher.rule.count(len(there)) :]
            assert complete.kept[layer][head] == sorted(stays | set(newest))
    return replay
