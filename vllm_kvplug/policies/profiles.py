"""The head profile that a policy is configured with."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from vllm_kvplug.calibrate.profile import HeadProfile, find_shipped
from vllm_kvplug.config import CONFIG_FLAG, explain
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.shape import ModelShape


def load_profile(policy: str, path: str | None, shape: ModelShape) -> HeadProfile:
    """The profile at `path`, or the shipped one of this architecture; PolicyError if it does not fit."""
    found = Path(path) if path else find_shipped(shape.fingerprint)
    advice = f'run `kvplug profile MODEL --texts FILE` and pass {CONFIG_FLAG} \'{{"profile": "OUT.json"}}\''
    if found is None:
        raise PolicyError(f"{policy} has no shipped head profile for {shape.name or 'this model'}: {advice}.")
    try:
        profile = HeadProfile.load(found)
    except OSError as error:
        raise PolicyError(f"{policy}: cannot read the profile in {CONFIG_FLAG}: {error}") from None
    except ValueError as error:
        reason = explain(error) if isinstance(error, ValidationError) else error
        raise PolicyError(f"{policy}: {found}, the profile in {CONFIG_FLAG}, is no head profile: {reason}") from None
    made_for = (profile.model.layers, profile.model.kv_heads, profile.model.query_heads, profile.model.head_dim)
    needed = (shape.layers, shape.kv_heads, shape.query_heads, shape.head_dim)
    if made_for != needed:
        raise PolicyError(
            f"{policy}: profile {found} was made for {profile.model.name} with (layers, KV heads, query heads, "
            f"head dim) = {made_for}; {shape.name or 'this model'} has {needed}. For this model, {advice}."
        )
    return profile
