"""Gates, write-gated attention and reconstruction scores as loops over heads, tokens and queries."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vllm_kvplug.gates.sink_gate import SinkGate
from vllm_kvplug.gates.write_gate import WriteGate


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean() + 1e-6) * weight


def write_score(gate: WriteGate, layer: int, head: int, k_pre: Tensor, k_rope: Tensor) -> float:
    """One key [d] of one head."""
    x = torch.cat([norm(k_pre, gate.norm_pre[layer]), norm(k_rope, gate.norm_rope[layer])])
    hidden = gate.w1[layer, head] @ x + gate.b1[layer, head]
    hidden = torch.tensor([0.5 * h * (1 + math.erf(h / math.sqrt(2))) for h in hidden.tolist()])
    logit = float(gate.w2[layer, head] @ hidden + gate.b2[layer, head])
    return 1 / (1 + math.exp(-logit))


def sink_score(gate: SinkGate, layer: int, head: int, hidden: Tensor) -> float:
    """One hidden state [D], for one KV head."""
    group, dim = gate.q_bias.shape[-2:]
    rows = gate.projection[layer, head]
    key = norm(rows[group * dim :] @ hidden, gate.norm_k[layer])
    scores = []
    for g in range(group):
        query = rows[g * dim : (g + 1) * dim] @ hidden + gate.q_bias[layer, head, g]
        query = norm(query, gate.norm_q[layer])
        own = math.exp(float(query @ key) / math.sqrt(dim) + float(gate.bias[layer, head, g]))
        sinks = sum(math.exp(float(query @ sink) / math.sqrt(dim)) for sink in gate.sinks[layer, head])
        scores.append(own / (own + sinks))
    return sum(scores) / group


def gated_row(query: Tensor, keys: Tensor, values: Tensor, gates: Tensor, i: int, window: int, scale: float) -> Tensor:
    """Output of query i [d] over keys and values [T, d] with their gates [T]."""
    weights = [
        math.exp(float(query @ keys[j]) * scale) * (1 if i - j < window else float(gates[j])) for j in range(i + 1)
    ]
    return sum(w * values[j] for j, w in enumerate(weights)) / sum(weights)


def reconstruction_score(
    queries: Tensor, keys: Tensor, before: int, first: int, last: int, scale: float
) -> list[float]:
    """queries [G, q, d] of the repetition, keys [k, d] of one head -> best attention per token of first..last-1."""
    own = queries.shape[1]
    start = len(keys) - own
    best = [0.0] * (last - first)
    for group in queries:
        for row, query in enumerate(group):
            seen = [*range(before), *range(first, last), *range(start, start + row + 1)]
            powers = {j: math.exp(float(query @ keys[j]) * scale) for j in seen}
            total = sum(powers.values())
            best = [max(score, powers[first + n] / total) for n, score in enumerate(best)]
    return best
