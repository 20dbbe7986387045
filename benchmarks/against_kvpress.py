"""Our SnapKV against kvpress's on the same queries and keys: scores, and the tokens each head keeps.

pip install --no-deps --target DIR kvpress==0.5.5
python -m benchmarks.against_kvpress MODEL --kvpress DIR --out FILE
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks import report
from benchmarks.parity import prompts
from vllm_kvplug.policies.base import PromptView
from vllm_kvplug.policies.registry import make_policy
from vllm_kvplug.shape import ModelShape

TOKENS = 600


def load_press(folder: Path) -> Any:
    """SnapKVPress alone: the package's own __init__ imports evaluation dependencies."""
    sys.path.insert(0, str(folder))
    for name in ("kvpress", "kvpress.presses"):
        module = ModuleType(name)
        module.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = module
    from kvpress.presses.snapkv_press import SnapKVPress

    return SnapKVPress(compression_ratio=0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--kvpress", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    press = load_press(args.kvpress)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="eager").eval()
    c = model.config
    heads, query_heads, dim = c.num_key_value_heads, c.num_attention_heads, c.hidden_size // c.num_attention_heads
    policy = make_policy("snapkv", {"ratio": 0.5}, ModelShape(c.num_hidden_layers, heads, query_heads, dim))
    rows: list[dict[str, Any]] = []

    def compare(layer: int, module: Any, kwargs: dict[str, Any]) -> None:
        keys = kwargs["past_key_values"].layers[layer].keys
        theirs = press.score(module, kwargs["hidden_states"], keys, None, None, kwargs)[0]
        query = module.q_proj(kwargs["hidden_states"]).view(1, -1, query_heads, dim).transpose(1, 2)
        query, _ = apply_rotary_pos_emb(query, query, *kwargs["position_embeddings"])
        window = query[0, :, -policy.query_window :].transpose(0, 1)
        ours = policy.score(PromptView(window, keys[0], layer, range(heads), dim**-0.5))
        kept = policy.kept(TOKENS)[layer][0]
        mine, other = ours.topk(kept, 1).indices, theirs.topk(kept, 1).indices
        outside = slice(0, TOKENS - policy.query_window)
        rows.append(
            {
                "layer": layer,
                "largest_score_difference": (ours[:, outside] - theirs[:, outside]).abs().max().item(),
                "kept": kept * heads,
                "kept_by_both": sum(len(set(a.tolist()) & set(b.tolist())) for a, b in zip(mine, other, strict=True)),
            }
        )

    for i, block in enumerate(model.model.layers):
        hook = lambda module, _, kwargs, __, i=i: compare(i, module, kwargs)  # noqa: E731
        block.self_attn.register_forward_hook(hook, with_kwargs=True)
    with torch.no_grad():
        model(torch.tensor([prompts(args.model)[-1][:TOKENS]]), use_cache=True)
    metrics = {
        "kvpress.snapkv.largest_score_difference": max(r["largest_score_difference"] for r in rows),
        "kvpress.snapkv.kept_by_both": sum(r["kept_by_both"] for r in rows) / sum(r["kept"] for r in rows),
    }
    print(metrics)
    report.write(args.out, report.result("against kvpress 0.5.5", metrics, rows))


if __name__ == "__main__":
    main()
