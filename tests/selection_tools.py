"""Requests that select from the host, held to their reference step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine_tools import ROUNDING, Answer, Snapshot, Watch
from reference import Reference, Replay
from reference_hosted import Hosted, Selection
from reference_yakv import Selecting

from vllm_kvplug.placement.integrity import kept_positions

COARSE = 2e-2
"""As ROUNDING, where K and V of 4 bits differ: a value in the middle of two codes may get either."""


def check_steps(
    reference: Reference,
    rule: Selecting | Hosted,
    prompt: list[int],
    answer: Answer,
    snapshots: Sequence[Snapshot],
) -> Replay:
    """Asserts that every step saw the reference's tokens in every head and gave its distribution."""
    stored = {s.length: s.kept for s in snapshots}
    replay = reference.replay(prompt, replace(rule, engine=stored), len(answer.tokens), force_tokens=answer.tokens)
    for length in sorted(replay.kept.keys() & stored.keys()):
        for layer, heads in enumerate(replay.kept[length]):
            for head, theirs in enumerate(heads):
                ours = set(stored[length][layer][head])
                assert ours == set(theirs), f"length {length} layer {layer} head {head}: {ours ^ set(theirs)}"
    error = (answer.logprobs - replay.logits.log_softmax(-1)).abs().amax(1)
    assert error.median() <= ROUNDING
    assert error.max() <= (ROUNDING if rule.codec == "auto" else COARSE), error
    return replay


class WatchHosted(Watch):
    """Snapshots have positions where page tables have numbers on the host.

    hosted: of each request, the positions of what is on the host for every head, once its prompt is complete.
    """

    def __init__(self, llm: Any, **what: Any):
        super().__init__(llm, **what)
        cutter, self.hosted = self.runtime.cutter, dict[str, list[list[int]]]()
        judge, ready, survivors = cutter._judge, cutter.selector.ready, {}

        def watched_judge(request: Any, cut: int) -> Any:
            lengths = judge(request, cut)
            tables, slot = self.runtime.tables, request.slot
            before = tables.lengths[slot].clone()
            tables.lengths[slot] = lengths.int()
            survivors[slot] = kept_positions(tables, slot)
            tables.lengths[slot] = before
            return lengths

        def watched_ready(request: Any, blocks: Any) -> None:
            ready(request, blocks)
            (name,) = [name for name, live in self.runtime.live.items() if live is request]
            stays = kept_positions(self.runtime.tables, request.slot)
            pairs = zip(survivors[request.slot], stays, strict=True)
            self.hosted[name] = [sorted(set(all_of) - set(some)) for all_of, some in pairs]

        cutter._judge, cutter.selector.ready = watched_judge, watched_ready

    def seen(self, answer: Answer) -> list[Snapshot]:
        return [replace(s, kept=self._positions(answer, s)) for s in self.snapshots[answer.request_id]]

    def _positions(self, answer: Answer, snapshot: Snapshot) -> list[list[list[int]]]:
        base, heads = self.runtime.selector.base, len(snapshot.kept[0])

        def of_head(layer: int, head: int) -> list[int]:
            kept = snapshot.kept[layer][head]
            numbers = [t - base for t in kept if t >= base]
            hosted = self.hosted[answer.request_id][layer * heads + head] if numbers else []
            return sorted([t for t in kept if t < base] + [hosted[number] for number in numbers])

        return [[of_head(layer, head) for head in range(heads)] for layer in range(len(snapshot.kept))]


def check_hosted(reference: Reference, rule: Hosted, prompt: list[int], answer: Answer, watch: WatchHosted) -> Replay:
    """As `check_steps`; and what was kept and hosted at the prompt's end."""
    snapshots = watch.seen(answer)
    replay = check_steps(reference, rule, prompt, answer, snapshots)
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
            newest = hosted[layer][head][-rule.selected(complete.length) :]
            assert complete.kept[layer][head] == sorted(stays | set(newest))
    return replay
