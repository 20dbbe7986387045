"""Our scorers against kvpress's on the same prompt: scores, and the tokens each head keeps.

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
from vllm_kvplug.planning import model_shape
from vllm_kvplug.policies.base import PromptView
from vllm_kvplug.policies.registry import make_policy

TOKENS = 600


def load_presses(folder: Path) -> dict[str, Any]:
    """By the names of our policies. The package's own __init__ imports evaluation dependencies."""
    sys.path.insert(0, str(folder))
    for name in ("kvpress", "kvpress.presses"):
        module = ModuleType(name)
        module.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = module
    from kvpress.presses.expected_attention_press import ExpectedAttentionPress
    from kvpress.presses.snapkv_press import SnapKVPress

    return {"snapkv": SnapKVPress(0.5), "expected_attention": ExpectedAttentionPress(0.5)}


KNOBS: dict[str, dict[str, Any]] = {"snapkv": {}, "expected_attention": {"window": TOKENS}}


def compared(policy: Any, view: PromptView, theirs: torch.Tensor, judged: slice) -> dict[str, Any]:
    """judged: the tokens that both score, rather than keep anyway."""
    ours, kept = policy.score(view), policy.kept(TOKENS)[view.layer][0]
    mine, other = ours.topk(kept, 1).indices, theirs.topk(kept, 1).indices
    return {
        "policy": policy.name,
        "layer": view.layer,
        "largest_score_difference": (ours[:, judged] - theirs[:, judged]).abs().max().item(),
        "largest_score": theirs[:, judged].max().item(),
        "kept": kept * len(view.heads),
        "kept_by_both": sum(len(set(a.tolist()) & set(b.tolist())) for a, b in zip(mine, other, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--kvpress", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    presses = load_presses(args.kvpress)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="eager").eval()
    shape = model_shape(model.config, args.model, 1)
    policies = [make_policy(name, {"ratio": 0.5, **knobs}, shape) for name, knobs in KNOBS.items()]
    rows: list[dict[str, Any]] = []

    def compare(layer: int, module: Any, kwargs: dict[str, Any]) -> None:
        cache = kwargs["past_key_values"].layers[layer]
        query = module.q_proj(kwargs["hidden_states"]).view(1, -1, shape.query_heads, shape.head_dim).transpose(1, 2)
        query, _ = apply_rotary_pos_emb(query, query, *kwargs["position_embeddings"])
        module.rotary_emb = model.model.rotary_emb  # where kvpress looks for it
        for policy in policies:
            theirs = presses[policy.name].score(
                module, kwargs["hidden_states"], cache.keys, cache.values, None, kwargs
            )[0]
            window = query[0, :, -policy.query_window :].transpose(0, 1)
            heads, scale = range(shape.kv_heads), shape.head_dim**-0.5
            view = PromptView(window, cache.keys[0], layer, heads, scale, cache.values[0])
            judged = slice(0, TOKENS - policy.query_window) if policy.name == "snapkv" else slice(4, TOKENS)
            rows.append(compared(policy, view, theirs, judged))

    for i, block in enumerate(model.model.layers):
        hook = lambda module, _, kwargs, __, i=i: compare(i, module, kwargs)  # noqa: E731
        block.self_attn.register_forward_hook(hook, with_kwargs=True)
    with torch.no_grad():
        model(torch.tensor([prompts(args.model)[-1][:TOKENS]]), use_cache=True)
    metrics = {}
    for name in KNOBS:
        mine = [r for r in rows if r["policy"] == name]
        metrics |= {
            f"kvpress.{name}.largest_score_difference": max(r["largest_score_difference"] for r in mine),
            f"kvpress.{name}.kept_by_both": sum(r["kept_by_both"] for r in mine) / sum(r["kept"] for r in mine),
        }
    print(metrics)
    report.write(args.out, report.result("against kvpress 0.5.5", metrics, rows))


if __name__ == "__main__":
    main()
