"""Tokens that requests are made to say, while the engine still reports what it would have said.

On a GPU stock vLLM does it (`--enable-trace-replay`, which wants Model Runner V2); on the CPU, where that runner does
not run, a logits processor. Both act behind the model, so that decode steps run in captured graphs as ever, and
log-probabilities are those of the model in both: vLLM takes them before logits are processed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from vllm_kvplug.eval.fidelity import TOP, Continuation

SAID = "said"
"""Key of `SamplingParams.extra_args` with the tokens that a request has to say."""


class Sayer(LogitsProcessor):
    """Leaves every request that has something to say its next token alone."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool):
        self._said: dict[int, tuple[list[int], list[int]]] = {}  # by row: what it has to say, and what it has said

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._said, batch_update, _to_say)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (tokens, said) in self._said.items():
            token = tokens[min(len(said), len(tokens) - 1)]
            kept = logits[row, token].item()
            logits[row] = -torch.inf
            logits[row, token] = kept
        return logits


def _to_say(params: SamplingParams, prompt: list[int] | None, said: list[int]) -> tuple[list[int], list[int]] | None:
    tokens = (params.extra_args or {}).get(SAID)
    return (tokens, said) if tokens else None


ENGINE: dict[str, Any] = {"logits_processors": [Sayer]} if torch.version.cuda is None else {"enable_trace_replay": True}
"""Arguments of an engine whose requests can be told what to say."""


def follow(llm: Any, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[Continuation]:
    """What the engine thinks of every token of given answers to prompts. Their tokens, and the distributions."""
    params = []
    for answer in answers:
        replay = {"extra_args": {SAID: answer}} if "logits_processors" in ENGINE else {"trace_decode_token_ids": answer}
        params.append(SamplingParams(temperature=0, max_tokens=len(answer), **WITH_LOGPROBS, **replay))
    return _continuations(llm, prompts, params)


def speak(llm: Any, prompts: Sequence[list[int]], tokens: int) -> list[Continuation]:
    """Greedy continuations of so many tokens, end-of-sequence tokens or not."""
    return _continuations(
        llm, prompts, [SamplingParams(temperature=0, max_tokens=tokens, **WITH_LOGPROBS)] * len(prompts)
    )


WITH_LOGPROBS = {"logprobs": TOP, "ignore_eos": True, "detokenize": False}


def _continuations(llm: Any, prompts: Sequence[list[int]], params: list[SamplingParams]) -> list[Continuation]:
    asked: Any = [{"prompt_token_ids": ids} for ids in prompts]
    said = [output.outputs[0] for output in llm.generate(asked, params, use_tqdm=False)]
    return [
        Continuation(list(one.token_ids), [{t: p.logprob for t, p in step.items()} for step in one.logprobs])
        for one in said
    ]
