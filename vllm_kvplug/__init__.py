"""KV-cache policies, per attention head, for stock vLLM."""

__version__ = "0.1.0"
