"""Real engines for tests: the tiny model under a policy, its cases, and a look at the state in every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import (
    Positions,
    Reference,
    Replay,
    Rule,
    Streaming,
)

from benchmarks.engine import engine, runtime, scheduler
from vllm_kvplug.tiny import VOCAB

_set_num_threads = torch.set_num_threads  # vLLM's CPU worker puts a warning in its place
LAYERS, KV_HEADS = 3, 2
TIE = 1e-5
"""Scores this close, relative to the larger, may be ranked either way by two ways of computing them."""

ROUNDING = 5e-5
"""Largest difference of log-probabilities that float32 explains. On the tiny model, whose weights are large,
stock vLLM and Hugging Face are each up to 2.4e-5 away from float64; one token too many in one head changes
log-probabilities by about 1e-2."""


ONE_OF_MANY = {} if torch.version.cuda is None else {"kv_cache_memory_bytes": 256 << 20, "gpu_memory_utilization": 0.1}
"""On a GPU, which engines of earlier tests in this process have not given back whole."""


def token_ids(length: int, seed: int = 0) -> list[int]:
    """A random prompt for the tiny model."""
    generator = torch.Generator().manual_seed(1_000 * seed + length)
    return torch.randint(VOCAB, (length,), generator=generator).tolist()


# ---------------------------------------------------------------------------------------- engines


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """For modules that import it: the tiny model has too little work to share between threads."""
    threads = torch.get_num_threads()
    _set_num_threads(1)
    yield
    _set_num_threads(threads)


@contextmanager
def tiny_engine(model_dir: Path, **arguments: Any) -> Iterator[Any]:
    """An engine for the tiny model in float32, with prompt chunks of 256 tokens unless told otherwise."""
    settings: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "float32",
        "max_model_len": 2048,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 8,
        "max_logprobs": -1,
        "seed": 0,
        **ONE_OF_MANY,
    }
    with engine(str(model_dir), **{**settings, **arguments}) as llm:
        try:
            yield llm
        finally:
            # A caller's variable may keep `llm` alive until the next engine has started.
            llm.llm_engine.engine_core.shutdown()


@dataclass
class Answer:
    """What an engine made of a request. outputs: one per sample. logprobs: float32 [steps, vocab] if asked for all."""

    request_id: str
    outputs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] | None = None
    preemptions: int = 0
    aborted: bool = False

    @property
    def tokens(self) -> list[int]:
        return list(self.outputs[0].token_ids)

    @property
    def logprobs(self) -> torch.Tensor:
        rows = self.outputs[0].logprobs
        return torch.tensor([[row[token].logprob for token in range(VOCAB)] for row in rows])


@dataclass
class Ask:
    """A request: when it comes, counted in steps, and when it is aborted."""

    prompt: list[int]
    tokens: int
    arrives: int = 0
    aborted: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)


def serve(llm: Any, asks: Sequence[Ask], after_step: Callable[[], None] | None = None) -> list[Answer]:
    """Runs requests to their ends, step by step, and one step more so that the worker hears of the last ends."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    base = {"temperature": 0, "ignore_eos": True, "detokenize": False, "output_kind": RequestOutputKind.FINAL_ONLY}
    core, sched = llm.llm_engine, scheduler(llm)
    answers: dict[int, Answer] = {}
    by_id: dict[str, Answer] = {}
    inner: dict[int, list[Any]] = {}
    step = 0
    while len(answers) < len(asks) or core.has_unfinished_requests():
        for i, ask in enumerate(asks):
            if ask.arrives <= step and i not in answers:
                params = SamplingParams(**{**base, "max_tokens": ask.tokens, **ask.sampling})
                known = set(sched.requests)
                core.add_request(str(i), {"prompt_token_ids": ask.prompt}, params)
                inner[i] = [sched.requests[r] for r in sched.requests.keys() - known]
                answers[i] = by_id[str(i)] = Answer(inner[i][0].request_id)
            if i in answers and ask.aborted == step and not answers[i].outputs:
                answers[i].aborted = True
                core.abort_request([str(i)])
        for output in core.step():
            if output.finished and not by_id[output.request_id].aborted:
                by_id[output.request_id].outputs = output.outputs
                by_id[output.request_id].prompt_logprobs = output.prompt_logprobs
        if after_step is not None:
            after_step()
        step += 1
        assert step < 20_000, "the engine makes no progress"
    core.step()
    for i, answer in answers.items():
        answer.preemptions = sum(request.num_preemptions for request in inner[i])
    return [answers[i] for i in range(len(asks))]


def greedy(llm: Any, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """Greedy tokens of prompts that are submitted at once."""
    return [answer.tokens for answer in serve(llm, [Ask(prompt, tokens) for prompt in prompts])]


def counting(llm: Any) -> Counter[str]:
    """What the worker counts from now on; it hands its counts over with every step."""
    state, total = runtime(llm), Counter[str]()
    take_counts = state.take_counts

    def watched() -> dict[str, int]:
        counts = take_counts()
        total.update({name.removeprefix("kvplug."): count for name, count in counts.items()})
        return counts

    state.take_counts = watched
    return total


@dataclass(frozen=True)
class Snapshot:
    """A request after a step: its tokens so far, those after which its prompt is cut, and what every head stores."""

    length: int
    prompt_end: int
    kept: Positions


class Watch:
    """Looks at a policy engine's worker at the end of every step, while the requests of the step are live.

    admitted: the ends of the prompts of each request, one more with every resumption. snapshots: of each
    request, in order. pages: the page ids of every head at each of them, if asked for.
    """

    def __init__(self, llm: Any, snapshots: bool = True, integrity: bool = False, pages: bool = False):
        from vllm_kvplug.placement.integrity import check_integrity, head_pages, kept_positions

        self.runtime, self._manager = runtime(llm), scheduler(llm)._head_pages
        self.steps = 0
        self.clear()
        begin_step, prepare, end_step = self.runtime.begin_step, self.runtime.prepare, self.runtime.end_step
        lengths: dict[str, int] = {}

        def watched_begin(lifecycle: Any) -> None:
            lengths.clear()
            for request_id, admission in lifecycle.admitted.items():
                self.admitted.setdefault(request_id, []).append(admission.tokens)
            begin_step(lifecycle)

        def watched_prepare(request_ids: Sequence[str], starts: Any, ends: Sequence[int], *rest: Any) -> Any:
            lengths.update(zip(request_ids, ends, strict=True))
            return prepare(request_ids, starts, ends, *rest)

        def watched_end() -> None:
            end_step()
            self.steps += 1
            if integrity:
                check_integrity(self.runtime.tables, self.rows())
            for request_id, length in lengths.items():
                live = self.runtime.live[request_id]
                if snapshots:
                    flat = kept_positions(self.runtime.tables, live.slot)
                    heads = self.runtime.geometry.kv_heads
                    kept = [flat[i : i + heads] for i in range(0, len(flat), heads)]
                    self.snapshots.setdefault(request_id, []).append(Snapshot(length, live.prefill_end, kept))
                if pages:
                    heads = range(self.runtime.tables.sizes.heads)
                    found = [head_pages(self.runtime.tables, live.slot, head) for head in heads]
                    self.pages.setdefault(request_id, []).append(found)

        self.runtime.begin_step = watched_begin
        self.runtime.prepare = watched_prepare
        self.runtime.end_step = watched_end

    def clear(self) -> None:
        self.admitted: dict[str, list[int]] = {}
        self.snapshots: dict[str, list[Snapshot]] = {}
        self.pages: dict[str, list[list[list[int]]]] = {}

    def rows(self) -> dict[int, list[int]]:
        """Block ids of each live slot as the scheduler has them, 0 for those given back."""
        blocks = self._manager.req_to_blocks
        return {live.slot: [b.block_id for b in blocks.get(name, ())] for name, live in self.runtime.live.items()}


# ---------------------------------------------------------------------------------------- comparison


@dataclass(frozen=True)
class Pinned(Rule):
    """Keeps given tokens of the prompt: those an engine chose where scores tie."""

    kept: Positions

    def budgets(self, layers: int, heads: int, tokens: int) -> list[list[int]]:
        return [[len(head) for head in layer] for layer in self.kept]

    def scores(self, index: int, layer: Any) -> torch.Tensor:
        result = torch.zeros(layer.keep.shape)
        for head, positions in enumerate(self.kept[index]):
            result[head, positions] = 1
        return result


def equal_up_to_ties(kept: Positions, replay: Replay) -> bool:
    """Asserts that an engine kept the reference's tokens of a prompt. False if some differ whose scores tie."""
    exact = True
    for layer, rows in enumerate(replay.kept_after_prompt):
        for head, row in enumerate(rows):
            ours, theirs = set(kept[layer][head]), set(row)
            if ours == theirs:
                continue
            place = f"layer {layer} head {head}"
            assert len(ours) == len(theirs), f"{place}: {len(ours)} tokens kept, the reference keeps {len(theirs)}"
            assert replay.scores, f"{place}: kept {sorted(ours - theirs)}, the reference {sorted(theirs - ours)}"
            scores = replay.scores[layer][head]
            swapped = scores[sorted(ours ^ theirs)]
            spread = float(swapped.max() - swapped.min())
            assert spread <= TIE * float(swapped.abs().max()), (
                f"{place}: kept {sorted(ours - theirs)}, the reference {sorted(theirs - ours)}, scores {swapped}"
            )
            exact = False
    return exact


def expected_later(rule: Rule, replay: Replay, after_prompt: Positions, snapshot: Snapshot) -> Positions:
    """What heads must store at a snapshot, given what they kept when the prompt was complete."""
    if isinstance(rule, Streaming):
        length = snapshot.length
        one = [t for t in range(length) if t < rule.sinks or t >= length - rule.window]
        return [[one for _ in layer] for layer in after_prompt]
    if snapshot.length < snapshot.prompt_end:
        cut = max(length for length in replay.kept_in_prompt if length <= snapshot.length)
        before = replay.kept_in_prompt[cut] or [[[] for _ in layer] for layer in after_prompt]
        return [[head + list(range(cut, snapshot.length)) for head in layer] for layer in before]
    new = list(range(snapshot.prompt_end, snapshot.length))
    return [[head + new for head in layer] for layer in after_prompt]


def check_kept(rule: Rule, replay: Replay, snapshots: Sequence[Snapshot]) -> Positions:
    """Asserts that a request stored the reference's tokens in every step. Returns what it kept of its prompt."""
    assert snapshots, "nothing was seen of the request"
    prompt_end = snapshots[-1].prompt_end
    snapshots = [s for s in snapshots if s.prompt_end == prompt_end]
    (complete,) = [s for s in snapshots if s.length == prompt_end]
    exact = equal_up_to_ties(complete.kept, replay)
    for snapshot in snapshots:
        expected = expected_later(rule, replay, complete.kept, snapshot)
        assert snapshot.kept == expected, f"at {snapshot.length} tokens of a prompt of {prompt_end}"
    if exact:
        assert snapshots[-1].kept == replay.kept_at_end
    return complete.kept


def check_logprobs(answer: Answer, replay: Replay) -> None:
    """Asserts that an engine's distribution at every step is the reference's, and its greedy tokens too."""
    expected = replay.logits.log_softmax(-1)
    error = (answer.logprobs - expected).abs()
    steps = (error.amax(1) > ROUNDING).nonzero().flatten().tolist()
    assert not steps, f"log-probabilities are off by {error.max():.2e} in steps {steps} of {len(error)}"
    assert answer.tokens == replay.tokens


def check_segments(reference: Reference, rule: Rule, prompt: list[int], tokens: list[int], ends: Sequence[int]) -> None:
    """Asserts greedy `tokens` of a request that was computed anew, as one prompt, at each of `ends`."""
    starts = sorted({end - len(prompt) for end in ends})
    assert starts[0] == 0
    for start, stop in zip(starts, [*starts[1:], len(tokens)], strict=True):
        if stop > start:
            replay = reference.replay(prompt + tokens[:start], rule, stop - start)
            assert tokens[start:stop] == replay.tokens, f"tokens {start} to {stop} of prompt {len(prompt)}"
