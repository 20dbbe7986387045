"""Shipped head profiles (JSON, package data)."""
