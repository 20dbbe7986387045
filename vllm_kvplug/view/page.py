"""A record as one HTML page that needs nothing else: no network, no other file."""

from __future__ import annotations

import json
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from vllm_kvplug.view.record import Record


def render(record: Record) -> str:
    """The page, with its numbers computed here and drawn by its script."""
    data = {
        **record.model_dump(mode="json"),
        "tokens": record.tokens,
        "counts": record.counts(),
        "share": record.share(),
        "votes": record.votes(),
        "triggers": record.triggers,
    }
    files = {name: _file(f"page.{name}") for name in ("css", "js")}
    title = escape(f"{record.policy} on {Path(record.model).name}")
    return Template(_file("page.html")).substitute(files, title=title, data=_inert(data))


def _inert(data: object) -> str:
    """JSON that cannot end the script element it stands in, whatever a prompt says."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _file(name: str) -> str:
    return resources.files("vllm_kvplug.view").joinpath(name).read_text(encoding="utf-8")
