"""Scores, memory and fidelity of policies."""
