"""What one request may ask of the KV policy: `kvplug.*` keys of its sampling parameters' `extra_args`.

Over HTTP these are `vllm_xargs`, whose values are numbers, strings and flat lists of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

PREFIX = "kvplug."
KEYS = ("kvplug.budget", "kvplug.protect", "kvplug.off", "kvplug.context_end", "kvplug.scores")

MOST_RANGES = 64
"""Protected ranges of a request: each is a kernel launch per layer, in a step that others wait for."""


class OptionError(ValueError):
    """A `kvplug.*` option that cannot be served; the message names the option."""


@dataclass(frozen=True)
class RequestOptions:
    """Options of one request, checked.

    budget: share of the prompt to keep, in the policy's own measure (rho, ratio); None for the server's.
    protect: ranges [start, end) of prompt tokens that no head may drop; ascending and disjoint.
    off: keep everything, as stock vLLM does.
    context_end: so many of the prompt's first tokens are cut before what follows is seen; None for all of them.
    scores: name of a file with the prompt's scores, for a policy that does not make them itself.
    """

    budget: float | None = None
    protect: tuple[tuple[int, int], ...] = ()
    off: bool = False
    context_end: int | None = None
    scores: str | None = None

    def given(self) -> list[str]:
        """Keys of the options that are not as they are for everyone."""
        present = (
            self.budget is not None,
            bool(self.protect),
            self.off,
            self.context_end is not None,
            self.scores is not None,
        )
        return [key for key, here in zip(KEYS, present, strict=True) if here]

    def protected(self, tokens: int) -> int:
        """How many of the first `tokens` tokens are protected."""
        return sum(max(min(end, tokens) - start, 0) for start, end in self.protect)

    def prefill_end(self, tokens: int) -> int:
        """How many of a prompt's `tokens` are what a policy calls the prompt."""
        return tokens if self.context_end is None or self.off else min(self.context_end, tokens)

    def protecting(self, *ranges: tuple[int, int]) -> RequestOptions:
        """The same with more protected ranges."""
        return replace(self, protect=_disjoint([*self.protect, *ranges]))


def parse_options(extra_args: Mapping[str, Any] | None) -> RequestOptions:
    """The options among a request's `extra_args`; OptionError for an unknown or malformed one."""
    given = {key: value for key, value in (extra_args or {}).items() if key.startswith(PREFIX)}
    unknown = sorted(given.keys() - set(KEYS))
    if unknown:
        raise OptionError(f"{unknown[0]}: no such option; there are {', '.join(KEYS)}")
    options = RequestOptions(
        _share(given.get("kvplug.budget")),
        _ranges(given.get("kvplug.protect")),
        _flag(given.get("kvplug.off")),
        _length(given.get("kvplug.context_end")),
        _name(given.get("kvplug.scores")),
    )
    if options.off and options.budget is not None:
        raise OptionError("kvplug.off keeps everything: remove kvplug.budget")
    return options


def _share(value: Any) -> float | None:
    if value is None:
        return None
    try:
        share = float(value)
    except (TypeError, ValueError, OverflowError):
        raise OptionError(f"kvplug.budget must be a number, got {value!r}") from None
    if not 0 < share <= 1:
        raise OptionError(f"kvplug.budget must be above 0 and at most 1, got {value!r}")
    return share


def _flag(value: Any) -> bool:
    if value in (None, False, 0, "false", "0"):
        return False
    if value in (True, 1, "true", "1"):
        return True
    raise OptionError(f"kvplug.off must be true or false, got {value!r}")


def _length(value: Any) -> int | None:
    if value is None:
        return None
    try:
        length = int(str(value))  # int(1.5) alone would be 1
    except ValueError:
        length = 0
    if length < 1:
        raise OptionError(f"kvplug.context_end must be a number of tokens, at least 1, got {value!r}")
    return length


def _name(value: Any) -> str | None:
    """Hexadecimal, so that no name leads out of a folder."""
    if value is None or (isinstance(value, str) and re.fullmatch("[0-9a-f]{1,64}", value)):
        return value
    raise OptionError(f"kvplug.scores must be up to 64 hexadecimal digits, got {value!r}")


def _ranges(value: Any) -> tuple[tuple[int, int], ...]:
    """[[start, end], ...], or flat [start, end, start, end], or the JSON of either."""
    if value is None:
        return ()
    expected = f"kvplug.protect must be token ranges [start, end, start, end, ...], got {value!r}"
    try:
        given = json.loads(value) if isinstance(value, str) else value
        if not isinstance(given, list | tuple):
            raise TypeError
        nested = all(isinstance(item, list | tuple) for item in given)
        pairs = given if nested else zip(given[::2], given[1::2], strict=True)
        ranges = [(int(str(start)), int(str(end))) for start, end in pairs]  # int(1.5) alone would be 1
    except (TypeError, ValueError, RecursionError):
        raise OptionError(expected) from None
    if any(start < 0 or end <= start for start, end in ranges):
        raise OptionError(f"{expected}; each needs 0 <= start < end")
    disjoint = _disjoint(ranges)
    if len(disjoint) > MOST_RANGES:
        raise OptionError(f"kvplug.protect takes up to {MOST_RANGES} ranges, got {len(disjoint)}")
    return disjoint


def _disjoint(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return tuple(merged)
