"""What the attention backend tells vLLM about itself."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from policy_tools import SHAPE
from vllm.v1.attention.backend import AttentionCGSupport

from vllm_kvplug import compat
from vllm_kvplug.policies.registry import make_policy
from vllm_kvplug.worker.backend import HeadPageBuilder


class Namespace(SimpleNamespace):
    """One that weak references may point to."""


@pytest.mark.parametrize(
    "policy, support",
    [("quest", AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE), ("yakv", AttentionCGSupport.NEVER)],
)
def test_graphs_whatever_the_spec(policy: str, support: AttentionCGSupport) -> None:
    """vLLM asks with stock specs when it measures what graphs take."""
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
    runtime = Namespace(policy=make_policy(policy, {}, replace(SHAPE, rotary=(1.0,) * 16)))
    compat.attach_runtime(config, runtime)
    assert HeadPageBuilder.get_cudagraph_support(config, object()) == support
