"""The one exception a user sees when a policy cannot be served as asked."""

from __future__ import annotations


class PolicyError(ValueError):
    """A configuration that cannot be served; the message names the flag to change."""
