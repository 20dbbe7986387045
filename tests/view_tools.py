"""Records of requests that no engine ran."""

from __future__ import annotations

from typing import Any

from vllm_kvplug.view.record import Record

PIECES = ["<b>", "</script>", "<script>alert(1)</script>", " & ", '"quoted"', "\u2028", "naïve", "\n", "${x}", "end"]
"""Ten tokens of a prompt that would like to be markup."""


def made_up(**fields: Any) -> Record:
    """3 layers of 2 heads, 10 prompt tokens: 60 of which 30 are kept; one of two triggers lands."""
    content: dict[str, Any] = {
        "model": "models/<tiny>",
        "policy": "heterocache",
        "knobs": {"rho": 0.5, "profile": "</script>.json"},
        "summary": "rho=0.5",
        "versions": {"vllm_kvplug": "0.1.0", "vllm": "0.32.0"},
        "prompt": PIECES,
        "answer": ["a", "b", "c", "<i>d</i>", "e", "f"],
        "kept": [[[(0, 10)], [(0, 1), (8, 10)]], [[(0, 2), (9, 10)], [(2, 3)]], [[(0, 10)], [(3, 4), (5, 6), (9, 10)]]],
        "roles": [["pivot", "satellite"], ["anchor", "anchor"], ["volatile", "anchor"]],
        "clusters": [{"layer": 0, "pivot": 0, "satellites": [1], "tokens": 3}],
        "checks": 2,
        "drifts": [
            {"checked": 2, "lands": 4, "clusters": [0]},
            {"checked": 5, "lands": 7, "clusters": [0]},
        ],
        "pool": {"blocks": 1001, "block_tokens": 16, "block_bytes": 1 << 19},
        "steps": [{"tokens": n, "blocks": b} for n, b in ((1500, 94), (1501, 48), (1502, 48), (1503, 49))],
    }
    return Record.model_validate({**content, **fields})
