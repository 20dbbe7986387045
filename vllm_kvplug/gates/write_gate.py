"""WG-KV's write gate (2512.17452): is this key worth admitting to the cache once it leaves the local window?

Shapes: L layers, H KV heads, d head dim, m hidden units. A leading `...` is empty or a batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPSILON = 1e-6
EVERY_HEAD = slice(None)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """float32, whatever comes in."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=EPSILON) * weight.float()


class WriteGate(nn.Module):
    """The gates of all layers and heads of one model, stacked.

    norm_pre, norm_rope  [L, d]          RMSNorm of keys before and after RoPE, shared by a layer's heads
    w1, b1               [L, H, m, 2d], [L, H, m]
    w2, b2               [L, H, m], [L, H]
    """

    MATRICES = ("w1",)

    def __init__(self, layers: int, kv_heads: int, head_dim: int, hidden: int):
        super().__init__()
        # Uniform within 1/sqrt(inputs), what torch does for a linear layer.
        inner, outer = (2 * head_dim) ** -0.5, hidden**-0.5
        heads = (layers, kv_heads)
        self.norm_pre = nn.Parameter(torch.ones(layers, head_dim))
        self.norm_rope = nn.Parameter(torch.ones(layers, head_dim))
        self.w1 = nn.Parameter(torch.empty(*heads, hidden, 2 * head_dim).uniform_(-inner, inner))
        self.b1 = nn.Parameter(torch.empty(*heads, hidden).uniform_(-inner, inner))
        self.w2 = nn.Parameter(torch.empty(*heads, hidden).uniform_(-outer, outer))
        self.b2 = nn.Parameter(torch.empty(heads).uniform_(-outer, outer))

    def score(self, layer: int, k_pre: Tensor, k_rope: Tensor, heads: slice = EVERY_HEAD) -> Tensor:
        """Keys before and after RoPE [..., heads, tokens, d], of any dtype -> float32 [..., heads, tokens] in [0, 1].

        `heads` are the global KV heads that the keys belong to. A key is admitted if its score exceeds tau. On a model
        that normalises keys (Qwen3), k_pre is the key behind that norm. Matrix products run in the weights' dtype.
        """
        keys = torch.cat([rms_norm(k_pre, self.norm_pre[layer]), rms_norm(k_rope, self.norm_rope[layer])], dim=-1)
        w1, b1, w2, b2 = (stacked[layer, heads] for stacked in (self.w1, self.b1, self.w2, self.b2))
        hidden = F.gelu(keys.to(w1.dtype) @ w1.transpose(-1, -2) + b1.unsqueeze(-2))
        logits = (hidden @ w2.unsqueeze(-1)).squeeze(-1) + b2.unsqueeze(-1)
        return logits.float().sigmoid()
