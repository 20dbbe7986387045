"""Learned gates: which tokens are worth keeping, said by small networks beside a frozen model (docs/gates.md)."""
