"""How many of the truly most attended prompt tokens do quantised keys ("landmarks") find?

    python -m benchmarks.landmark_recall MODEL --tasks tasks.py --out FILE [--png FILE] [--tokens 1024]
        [--task text2json multineedle]

Keys (after RoPE) of a prompt but its last 64 tokens are encoded head by head. Each token of the true answer, fed to the
model as if it had decoded it, then selects 3.125% of them as YAKV does (2604.08426): softmax over the landmarks, the
maximum over the query heads of a KV head, the top tokens. recall is the share of the selection by exact keys that is
found, mass the attention probability that the found tokens have, beside what those selected by exact keys have. means8
scores a token by the exact mean of its 8 keys. All in float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks import report
from benchmarks.eval_tasks import examples, load_tasks
from vllm_kvplug.quant.higgs import Higgs
from vllm_kvplug.quant.residual import MEAN_KEYS, ResidualHiggs, group_means, spread

SHARE = 0.03125
LOCAL = 64
MAX_QUERIES = 64
RECORDING = "kvplug_landmarks"

Scorer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Queries [H, Q, d] and keys [H, n, d] -> scores [H, Q, n]."""


def higgs_scorer(higgs: Higgs) -> Scorer:
    return lambda queries, keys: higgs.scores(higgs.lut(queries), *higgs.encode(keys))


def residual_scorer(residual: ResidualHiggs) -> Scorer:
    return lambda queries, keys: residual.scores(queries, residual.encode(keys))


def mean_scores(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return queries @ spread(group_means(keys), keys.shape[-2]).transpose(-1, -2)


def methods(dim: int) -> dict[str, tuple[float, Scorer]]:
    """Bits per value, scales included, and scores by the name of a method."""
    found: dict[str, tuple[float, Scorer]] = {}
    for bits in (1, 2, 4):
        higgs = Higgs(bits, dim)
        found[f"higgs{bits}"] = ((8 * higgs.pieces + 16) / dim, higgs_scorer(higgs))
    coarse, fine = Higgs(4, dim), Higgs(1, dim)
    bits_residual = (8 * fine.pieces + 16 + (8 * coarse.pieces + 16) / MEAN_KEYS) / dim
    found["residual1.5"] = (bits_residual, residual_scorer(ResidualHiggs(dim)))
    found["means8"] = (16 / MEAN_KEYS, mean_scores)
    return found


@contextmanager
def queries_and_keys(model: Any) -> Iterator[dict[int, tuple[torch.Tensor, torch.Tensor]]]:
    """While open, a forward pass leaves {layer: (queries [Hq, T, d], keys [H, T, d])} after RoPE in the dict."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(module, query, key, *args, **kwargs):
        seen[module.layer_idx] = query[0], key[0]
        return sdpa_attention_forward(module, query, key, *args, **kwargs)

    AttentionInterface.register(RECORDING, attend)
    AttentionMaskInterface.register(RECORDING, sdpa_mask)
    model.set_attn_implementation(RECORDING)
    yield seen


def measure(queries: torch.Tensor, keys: torch.Tensor) -> dict[str, dict[str, float]]:
    """One layer: queries [Hq, Q, d] of answer tokens, keys [H, n, d] of the prompt -> {method: {recall, mass}}."""
    heads, tokens, dim = keys.shape
    per_head = queries.reshape(heads, -1, dim)  # query heads of a KV head side by side

    def attention(scores: torch.Tensor) -> torch.Tensor:
        return (scores * dim**-0.5).softmax(-1).view(heads, -1, queries.shape[1], tokens)  # [H, G, Q, n]

    def selection(probabilities: torch.Tensor) -> torch.Tensor:
        best = probabilities.amax(1).topk(int(SHARE * tokens)).indices
        return torch.zeros(heads, queries.shape[1], tokens, dtype=torch.bool).scatter_(-1, best, True)

    exact = attention(per_head @ keys.transpose(-1, -2))
    truth = selection(exact)
    whole = (exact * truth[:, None]).sum().item()
    found = {}
    for name, (_, scorer) in methods(dim).items():
        selected = selection(attention(scorer(per_head, keys)))
        mass = (exact * selected[:, None]).sum().item() / whole
        found[name] = {"recall": (selected & truth).sum().item() / truth.sum().item(), "mass": mass}
    return found


def measure_example(model: Any, prompt: list[int], answer: list[int]) -> list[dict[str, dict[str, float]]]:
    """By layer."""
    with queries_and_keys(model) as seen, torch.no_grad():
        model(torch.tensor([prompt + answer[:MAX_QUERIES]]), use_cache=False)
    end = len(prompt)
    return [measure(queries[:, end:], keys[:, : end - LOCAL]) for _, (queries, keys) in sorted(seen.items())]


def draw(rows: list[dict[str, Any]], names: list[str], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name in names:
        axes.plot([row["layer"] for row in rows], [row[f"{name}.recall"] for row in rows], label=name)
    axes.set(xlabel="layer", ylabel=f"recall of the top {SHARE:.3%} of prompt tokens", ylim=(0, 1))
    axes.legend(loc="lower right", ncols=len(names), fontsize="small")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tasks", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=9001)
    parser.add_argument("--task", nargs="+", default=["text2json", "multineedle"])
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    made = examples(load_tasks(args.tasks), tokenizer, args.model, args.tokens, 1, args.seed)
    asked = [e for e in made if e["task"] in args.task]
    found = [measure_example(model, e["ids"], tokenizer(e["answer"])["input_ids"]) for e in asked]

    rows: list[dict[str, Any]] = []
    kinds = methods(model.config.head_dim)
    for layer in range(len(found[0])):
        values = {
            f"{name}.{what}": round(fmean(example[layer][name][what] for example in found), 4)
            for name in kinds
            for what in ("recall", "mass")
        }
        rows.append({"layer": layer, **values})
    metrics: dict[str, float] = {"landmarks.prompt_tokens": fmean(len(e["ids"]) for e in asked)}
    for name, (bits, _) in kinds.items():
        metrics |= {f"landmarks.{name}.bits": bits}
        metrics |= {
            f"landmarks.{name}.{w}": round(fmean(r[f"{name}.{w}"] for r in rows), 4) for w in ("recall", "mass")
        }
    print(metrics)
    report.write(args.out, report.result(f"landmark recall, {', '.join(args.task)}", metrics, rows))
    if args.png:
        draw(rows, list(kinds), args.png)


if __name__ == "__main__":
    main()
