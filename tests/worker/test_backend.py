"""What the attention backend tells vLLM about itself."""

from __future__ import annotations

from vllm.v1.attention.backend import AttentionCGSupport

from vllm_kvplug.worker.backend import HeadPageBuilder


def test_decode_steps_are_captured_whole() -> None:
    """Whatever the policy is; vLLM asks with stock specs when it measures what graphs take."""
    support = HeadPageBuilder.get_cudagraph_support(object(), object())
    assert support == AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
