"""What is checked of a request before it enters the engine; over HTTP a failure is a status 400."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_kvplug.config import CONFIG_FLAG, share_of
from vllm_kvplug.options import OptionError, RequestOptions, parse_options
from vllm_kvplug.plan import largest
from vllm_kvplug.policies.base import Policy


def check_request(
    policy: Policy[Any],
    extra_args: Mapping[str, Any] | None,
    prompt_len: int,
    longest: int,
    itemsize: int,
    blocks: int | None = None,
) -> None:
    """OptionError for options that cannot be served, or memory that could never hold the request.

    longest: tokens of prompt and answer at most; a preempted request computes its answer as part of its prompt.
    itemsize: bytes of an element of K and V. blocks: of the pool, None if not known.
    """
    options = parse_options(extra_args)
    if options.context_end is not None and options.context_end > prompt_len:
        raise OptionError(
            f"kvplug.context_end: the prompt has {prompt_len} tokens, the context ends at {options.context_end}"
        )
    beyond = [end for _, end in options.protect if end > prompt_len]
    if beyond:
        raise OptionError(f"kvplug.protect: the prompt has {prompt_len} tokens, a range ends at {beyond[0]}")
    served = policy.for_request(options)
    served.check_prompt(options.prefill_end(prompt_len))
    whole, limit = _kept_whole(options, prompt_len), policy.config.max_request_budget
    if whole > share_of(limit, prompt_len):
        what = "kvplug.protect" if options.prefill_end(prompt_len) == prompt_len else "kvplug.context_end"
        raise OptionError(
            f"{what}: {whole} of {prompt_len} tokens are more than the share of {limit} that this server "
            "allows a request to keep"
        )
    if served is not policy and blocks:  # vLLM has checked what a request without options needs
        most, usable = served.plan().peak_blocks(longest), blocks - 1  # one is vLLM's null block
        if most > usable:
            raise OptionError(
                f"with these kvplug options a request of up to {longest} tokens needs {most} blocks of the KV cache, "
                f"which has {usable}: lower max_tokens, or let the policy drop more"
            )
    # At some lengths rounding cuts no satellite at all, so both are asked.
    need = max(served.host_slots(options.prefill_end(tokens)) for tokens in (prompt_len, longest))
    capacity = policy.host_capacity(itemsize)
    if need > capacity:
        instead = ", or set it to 0, which turns retrieval off" if policy.retrieval else ""
        raise OptionError(
            f"a request of up to {longest} tokens needs {need} slots of host memory per rank and host_gib="
            f"{policy.config.host_gib:g} has {capacity}: lower max_tokens, or raise host_gib in {CONFIG_FLAG}{instead}"
        )


def _kept_whole(options: RequestOptions, prompt_len: int) -> int:
    """Tokens of the prompt that no head drops: those protected, and those behind a context."""
    context = options.prefill_end(prompt_len)
    return options.protected(context) + prompt_len - context


def longest_request(policy: Policy[Any], most: int, itemsize: int) -> int:
    """The longest request, up to `most` tokens, that the host tier can hold on its own; 0 if none."""
    capacity = policy.host_capacity(itemsize)
    return largest(lambda tokens: policy.host_slots(tokens) <= capacity, most)
