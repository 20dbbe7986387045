"""Fast KVzip's gate (2601.17668): how much would a model that repeats its context attend to this token?

Low-rank attention of a token to itself, against learned sink keys, on the hidden state that enters the attention
block (behind its layer norm). Shapes: L layers, H KV heads, G query heads a KV head, D hidden size, E gate dim,
S sinks.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from vllm_kvplug.gates.write_gate import EVERY_HEAD, rms_norm


class SinkGate(nn.Module):
    """The gates of all layers and heads of one model, stacked.

    projection      [L, H, (G+1)*E, D]  rows of a head: its G queries, then its key. A layer is one matrix product,
                                        and the rows of neighbouring heads are neighbours.
    q_bias          [L, H, G, E]
    norm_q, norm_k  [L, E]              shared by a layer's heads
    sinks           [L, H, S, E]
    bias            [L, H, G]
    """

    MATRICES = ("projection",)

    def __init__(self, layers: int, kv_heads: int, group: int, hidden_size: int, dim: int = 16, sinks: int = 16):
        super().__init__()
        bound = hidden_size**-0.5  # what torch does for a linear layer
        heads = (layers, kv_heads)
        self.projection = nn.Parameter(torch.empty(*heads, (group + 1) * dim, hidden_size).uniform_(-bound, bound))
        self.q_bias = nn.Parameter(torch.empty(*heads, group, dim).uniform_(-bound, bound))
        self.norm_q = nn.Parameter(torch.ones(layers, dim))
        self.norm_k = nn.Parameter(torch.ones(layers, dim))
        self.sinks = nn.Parameter(torch.zeros(*heads, sinks, dim))
        self.bias = nn.Parameter(torch.zeros(*heads, group))

    def rows(self, layer: int | slice, heads: slice = EVERY_HEAD) -> Tensor:
        """The layer's projection as one matrix [heads*(G+1)*E, D], for a caller that appends it to its own."""
        return self.projection[layer][..., heads, :, :].flatten(-3, -2)

    def logits(self, layer: int | slice, projected: Tensor, heads: slice = EVERY_HEAD) -> Tensor:
        """hidden @ rows.T, [tokens, heads*(G+1)*E] -> float32 [heads, G, tokens], whose sigmoid is a query's score.

        e^z / (e^z + sum e^u) is the sigmoid of z - logsumexp(u). With a slice of layers, all shapes get a leading
        dimension for them.
        """
        group, dim = self.q_bias.shape[-2:]
        projected = projected.float().unflatten(-1, (-1, group + 1, dim))  # [tokens, heads, G+1, E]
        q_bias, sinks, bias = (stacked[layer].float() for stacked in (self.q_bias, self.sinks, self.bias))
        queries = projected[..., :group, :] + q_bias[..., None, heads, :, :]
        queries = rms_norm(queries, self.norm_q[layer][..., None, None, None, :]) * dim**-0.5
        keys = rms_norm(projected[..., group, :], self.norm_k[layer][..., None, None, :])
        own = torch.einsum("...thge,...the->...hgt", queries, keys) + bias[..., heads, :, None]
        sink = torch.einsum("...thge,...hse->...hgts", queries, sinks[..., heads, :, :])
        return own - sink.logsumexp(-1)

    def score(self, layer: int | slice, hidden: Tensor, heads: slice = EVERY_HEAD) -> Tensor:
        """Attention input [tokens, D] of any dtype -> float32 [heads, tokens] in [0, 1]: mean over the group.

        `heads` are global KV heads; with a slice of layers, hidden and scores have a leading dimension for them.
        """
        rows = self.rows(layer, heads)
        return self.score_projected(layer, hidden.to(rows.dtype) @ rows.transpose(-1, -2), heads)

    def score_projected(self, layer: int | slice, projected: Tensor, heads: slice = EVERY_HEAD) -> Tensor:
        """As `score`, for a caller that has computed hidden @ rows.T itself."""
        return self.logits(layer, projected, heads).sigmoid().mean(-2)

    @torch.no_grad()
    def part(self, layers: slice) -> Self:
        """A gate of those layers alone, with copies of their weights."""
        count, kv_heads, rows, hidden_size = self.projection[layers].shape
        group, dim = self.q_bias.shape[-2:]
        part = type(self)(count, kv_heads, group, hidden_size, dim, self.sinks.shape[-2])
        part.load_state_dict({name: weight[layers].clone() for name, weight in self.state_dict().items()})
        return part

    @torch.no_grad()
    def put(self, layers: slice, part: SinkGate) -> None:
        """Take the weights of `part` for those layers."""
        for name, weight in part.state_dict().items():
            self.state_dict()[name][layers] = weight.to(self.projection.device)
