"""A policy in one word of a command line: NAME, NAME:JSON, or NAME@X with X as the knob that requests may change."""

from __future__ import annotations

from typing import Any

from vllm_kvplug.config import read_knobs
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.policies.registry import policy_class


def read_policy(text: str) -> tuple[str, dict[str, Any]]:
    """Name and knobs. Raises PolicyError for an unknown policy, a budget it has no knob for, or bad JSON."""
    head, colon, json_text = text.partition(":")
    name, at, budget = head.partition("@")
    knobs = read_knobs(json_text) if colon else {}
    knob = policy_class(name).Config.request_knob
    if not at:
        return name, knobs
    if knob is None:
        raise PolicyError(f"{text}: policy '{name}' has no single budget; give its knobs as {name}:JSON")
    if knob in knobs:
        raise PolicyError(f"{text}: give {knob} once, after @ or in JSON")
    try:
        return name, {knob: float(budget), **knobs}
    except ValueError:
        raise PolicyError(f"{text}: '{budget}' is not a number") from None
