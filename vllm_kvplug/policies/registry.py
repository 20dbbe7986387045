"""Names to policies: the built-in ones, and those of the entry point group `vllm_kvplug.policies`."""

from __future__ import annotations

import importlib
import json
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any

from vllm_kvplug.config import FLAG, parse_knobs
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.policies.base import Policy
from vllm_kvplug.shape import ModelShape

ENTRY_POINT_GROUP = "vllm_kvplug.policies"

BUILT_IN = {
    "duo": "vllm_kvplug.policies.duo:Duo",
    "expected_attention": "vllm_kvplug.policies.expected_attention:ExpectedAttention",
    "fastkvzip": "vllm_kvplug.policies.fastkvzip:FastKVzip",
    "fastkvzip+yakv": "vllm_kvplug.policies.fastkvzip_yakv:FastKVzipYakv",
    "heterocache": "vllm_kvplug.policies.heterocache:HeteroCache",
    "knorm": "vllm_kvplug.policies.knorm:Knorm",
    "oracle": "vllm_kvplug.policies.oracle:Oracle",
    "quest": "vllm_kvplug.policies.quest:Quest",
    "random": "vllm_kvplug.policies.random:Random",
    "rkv": "vllm_kvplug.policies.rkv:RKV",
    "shadowkv_landmarks": "vllm_kvplug.policies.shadowkv_landmarks:ShadowKVLandmarks",
    "snapkv": "vllm_kvplug.policies.snapkv:SnapKV",
    "synthetic": "vllm_kvplug.policies.synthetic:Synthetic",
    "streaming": "vllm_kvplug.policies.streaming:Streaming",
    "wgkv": "vllm_kvplug.policies.wgkv:WGKV",
    "wgkv+quest": "vllm_kvplug.policies.wgkv_quest:WGKVQuest",
    "wgkv+snapkv": "vllm_kvplug.policies.wgkv_snapkv:WGKVSnapKV",
    "wgkv+yakv": "vllm_kvplug.policies.wgkv_yakv:WGKVYakv",
    "yakv": "vllm_kvplug.policies.yakv:Yakv",
}
"""A name with a + is a policy whose slots are filled by two, such as one for admission and one for selection."""


def policy_names() -> list[str]:
    """Every known policy name, built-in and third-party."""
    return sorted(BUILT_IN.keys() | {entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)})


def policy_class(name: str) -> type[Policy[Any]]:
    """The class registered under `name`. Built-in names cannot be taken over.

    Raises:
        PolicyError: no policy has that name, or its entry point gives something else.
    """
    if name in BUILT_IN:
        module, attribute = BUILT_IN[name].split(":")
        return getattr(importlib.import_module(module), attribute)
    for entry in entry_points(group=ENTRY_POINT_GROUP, name=name):
        try:
            found = entry.load()
        except Exception as error:  # whatever a stranger's module raises while it is imported
            raise PolicyError(f"{FLAG} {name}: cannot load entry point {entry.value}: {error!r}") from error
        if not (isinstance(found, type) and issubclass(found, Policy)):
            raise PolicyError(f"{FLAG} {name}: entry point {entry.value} is not a Policy class")
        return found
    raise PolicyError(f"{FLAG} {name}: no such policy. Known policies: {', '.join(policy_names())}.")


def make_policy(name: str, knobs: dict[str, Any], shape: ModelShape) -> Policy[Any]:
    """A policy for a model, with every error raised that can be known before weights load."""
    cls = policy_class(name)
    config = parse_knobs(cls.Config, name, knobs)
    if config.host_gib and not cls.uses_host_tier:
        raise PolicyError(f"policy '{name}' keeps nothing on the host: remove host_gib from --kv-policy-config")
    return cls(config, shape)


@lru_cache(maxsize=64)
def policy_from_json(text: str, shape: ModelShape) -> Policy[Any]:
    """The policy of a lowered configuration; the same object for the same text and shape."""
    request = json.loads(text)
    return make_policy(request.pop("name"), request, shape)
