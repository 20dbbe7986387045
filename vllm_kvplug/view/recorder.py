"""One request through an engine in this process, and a record of what became of its KV cache.

    python -m vllm_kvplug.view.recorder JOB OUT     both are JSON files

An engine has a process of its own, which gives all its memory back when it ends.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_kvplug import compat
from vllm_kvplug.placement.tables import PageTables
from vllm_kvplug.shape import PAGE
from vllm_kvplug.view.record import Cluster, Drift, Pool, Record, Span, Step, spans_of

ENGINE = {"enable_prefix_caching": False, "enforce_eager": True, "max_num_seqs": 1, "async_scheduling": False}
"""Starts fast, and every step is complete when it has been looked at."""


class Recorder:
    """Looks at an engine after every step of its only request."""

    def __init__(self, llm: Any, prompt_tokens: int):
        self._engine = compat.OneRequest(llm)
        self._prompt_tokens = prompt_tokens
        self.kept: list[list[tuple[Span, ...]]] = []
        self.steps: list[Step] = []
        self.checks = 0
        self.drifts: list[Drift] = []
        if self._engine.runtime.retriever is not None:
            self._engine.runtime.retriever.on_check = self._on_check

    def look(self, _finished: int) -> None:
        """Call it after every step."""
        tokens = self._engine.tokens
        if not self.kept and (tokens is None or tokens >= self._prompt_tokens):  # None: a prompt that ended at once
            self._prompt_ended()
        if tokens is not None:
            self.steps.append(Step(tokens=tokens, blocks=self._engine.used_blocks))

    def _prompt_ended(self) -> None:
        runtime = self._engine.runtime
        (live,) = runtime.live.values()
        assert runtime.tables is not None
        most = runtime.geometry.max_tokens  # a number on the host stands above it: no position, and selected anew soon
        kept = [positions(runtime.tables, live.slot, head) for head in range(runtime.geometry.heads)]
        flat = [spans_of(t for t in head if t < most) for head in kept]
        heads = runtime.geometry.kv_heads
        self.kept = [flat[i : i + heads] for i in range(0, len(flat), heads)]

    def _on_check(self, length: int, due: int, clusters: list[int]) -> None:
        self.checks += 1
        if clusters:
            start = self._prompt_tokens
            self.drifts.append(Drift(checked=length - start, lands=due - start, clusters=tuple(clusters)))

    def pool(self) -> Pool:
        geometry, tables = self._engine.runtime.geometry, self._engine.runtime.tables
        assert tables is not None
        return Pool(blocks=tables.sizes.blocks, block_tokens=PAGE, block_bytes=geometry.block_bytes)

    def clusters(self) -> tuple[Cluster, ...]:
        """Those whose drift is watched."""
        if self.policy.retrieval is None:
            return ()

        def fetched(layer: int, heads: Sequence[int]) -> int:
            kept = [sum(end - start for start, end in self.kept[layer][head]) for head in heads]
            return sum(count for count in kept if count < self._prompt_tokens)

        return tuple(
            Cluster(layer=c.layer, pivot=c.pivot, satellites=c.satellites, tokens=fetched(c.layer, c.satellites))
            for c in self.policy.retrieval.clusters
        )

    @property
    def policy(self) -> Any:
        return self._engine.runtime.policy


def positions(tables: PageTables, slot: int, head: int) -> list[int]:
    """Sequence positions that a head of a live request stores, ascending."""
    index = torch.arange(int(tables.lengths[slot, head]), device=tables.lengths.device)
    return tables.positions.view(-1)[tables.locate(slot, head, index)].sort().values.tolist()


def record(
    llm: Any,
    knobs: dict[str, Any],
    prompt: list[int],
    max_tokens: int,
    pieces: Callable[[Sequence[int]], list[str]],
    **options: Any,
) -> Record:
    """Run a prompt of token ids greedily; pieces: the texts of tokens; options: of SamplingParams."""
    recorder = Recorder(llm, len(prompt))
    (output,) = compat.generate(llm, [prompt], [max_tokens], recorder.look, **options)
    profile = getattr(recorder.policy, "profile", None)
    return Record(
        model=recorder.policy.shape.name,
        policy=recorder.policy.name,
        knobs=knobs,
        summary=recorder.policy.summary(),
        versions=compat.versions(llm),
        prompt=tuple(pieces(prompt)),
        answer=tuple(pieces(output.token_ids)),
        kept=tuple(map(tuple, recorder.kept)),
        roles=profile.roles if profile else None,
        clusters=recorder.clusters(),
        checks=recorder.checks,
        drifts=tuple(recorder.drifts),
        pool=recorder.pool(),
        steps=tuple(recorder.steps),
    )


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that each token adds to the one before it: some tokenizers drop a space at a text's beginning."""

    def text(*tokens: int) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    before = [text(token) for token in ids]
    return before[:1] + [text(*ids[i : i + 2]).removeprefix(before[i]) for i in range(len(ids) - 1)]


def work(job: dict[str, Any]) -> Record:
    with compat.llm(**ENGINE | job["engine"]) as llm:
        tokenizer = llm.get_tokenizer()
        return record(llm, job["knobs"], job["prompt"], job["max_tokens"], lambda ids: token_texts(tokenizer, ids))


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(work(json.loads(Path(sys.argv[1]).read_text())).model_dump_json())
