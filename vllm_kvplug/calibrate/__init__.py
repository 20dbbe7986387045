"""Offline calibration: which KV heads of a model may be compressed, and by how much."""
