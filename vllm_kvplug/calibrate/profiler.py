"""Head profiling on a Hugging Face causal LM (HeteroCache, offline stage; App. B.1).

Shapes: L layers, H KV heads, Hq query heads, G = Hq/H, T prompt tokens. Only the attention row of the last
query is ever computed, so the memory is L*Hq*T numbers a step and not L*Hq*T^2.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from vllm_kvplug.calibrate.profile import FULL_ROLES, NO_WEIGHT, ProfiledText, ProfileSettings, Role
from vllm_kvplug.errors import PolicyError

RECORDING = "kvplug_recording"


REFRESH = 5
"""Decode steps from one look of a pivot to the next, as a server's drift checks have them."""


@dataclass(frozen=True)
class HeadScores:
    """stability [L,H], similarity and gain [L,H,H], averaged over texts; thresholds are applied later."""

    stability: Tensor
    similarity: Tensor
    gain: Tensor
    texts: tuple[ProfiledText, ...]


@dataclass(frozen=True)
class TextScores:
    """Of one text: stability [L,H]; similarity [L,H,H]; gain [L,H,H], NaN if the answer is short; decode steps run."""

    stability: Tensor
    similarity: Tensor
    gain: Tensor
    steps: int


# ---------------------------------------------------------------- capture
@contextmanager
def last_rows(model: PreTrainedModel) -> Iterator[dict[int, Tensor]]:
    """While open, each forward pass leaves {layer: softmax row of the last query [B, Hq, keys]} in the dict.

    The model computes with SDPA as usual. The last query sees every key, so its row needs no mask; models
    with sliding windows break that and are refused.
    """
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise PolicyError(f"profile: needs full attention in every layer, the model has {sorted(kinds)}")
    rows: dict[int, Tensor] = {}

    def attend(module, query, key, value, attention_mask, scaling=None, **kwargs):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        grouped = query[:, :, -1].unflatten(1, (key.shape[1], -1))  # [B, H, G, d]
        logits = grouped.float() @ key.float().transpose(-1, -2) * scale
        rows[module.layer_idx] = logits.softmax(-1).flatten(1, 2)
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)

    AttentionInterface.register(RECORDING, attend)
    AttentionMaskInterface.register(RECORDING, sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(RECORDING)
    try:
        yield rows
    finally:
        model.set_attn_implementation(before)


def stack_rows(rows: dict[int, Tensor], kv_heads: int, prompt: int) -> Tensor:
    """Rows of one sequence -> [L, H, T]: mean over the G query heads, prompt keys only."""
    stacked = torch.stack([rows[layer][0] for layer in sorted(rows)])
    return stacked[..., :prompt].unflatten(1, (kv_heads, -1)).mean(2)


# ---------------------------------------------------------------- scores
def active_set(rows: Tensor, top_fraction: float, kernel: int) -> Tensor:
    """rows [L, H, T] -> mask of the top int(top_fraction*T) positions (at least one) of the smoothed rows.

    Average pool with zero padding, stride 1. Ties go to the earlier position.
    """
    smooth = F.avg_pool1d(rows, kernel, stride=1, padding=kernel // 2)
    size = max(1, int(top_fraction * rows.shape[-1]))
    best = smooth.argsort(dim=-1, descending=True, stable=True)[..., :size]
    return torch.zeros_like(rows, dtype=torch.bool).scatter_(-1, best, True)


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """|A n B| / min(|A|, |B|) of masks [..., T] that broadcast against each other."""
    smaller = torch.minimum(a.sum(-1), b.sum(-1))
    return (a & b).sum(-1) / smaller


def caught(attention: Tensor, active: Tensor) -> Tensor:
    """Shares of attention [L, H, T] that go to sets [L, H or 1, H or 1, T]: [L, H, H or 1]."""
    share = attention / attention.sum(-1, keepdim=True)
    return (share[:, :, None] * active).sum(-1)


@torch.inference_mode()
def score_text(model: PreTrainedModel, ids: Tensor, settings: ProfileSettings) -> TextScores:
    """ids [T]. Stability: median over decode steps of the overlap with the prefill's active set. Similarity: pairwise
    overlap at the prefill's last query only, as in the released code; the paper's text takes a median over
    steps of the maximum over peers instead, which does not say who the peer is. Gain [i, j], ours: mean over decode
    steps of the share of head i's attention to the prompt that goes to j's active set of up to `REFRESH` steps ago,
    less the share that goes to i's own active set of the prefill: what i has of following j. Decoding is greedy and
    ends with the model's answer, since what follows an end token is not the model's own text.
    """
    kv_heads = getattr(model.config, "num_key_value_heads", None) or model.config.num_attention_heads
    stop = model.generation_config.eos_token_id
    stops = set(stop) if isinstance(stop, list) else {stop}
    overlaps: list[Tensor] = []
    gains: list[Tensor] = []

    with last_rows(model) as rows:

        def current() -> tuple[Tensor, Tensor]:
            """Attention to the prompt [L, H, T], and the active set."""
            attention = stack_rows(rows, kv_heads, len(ids))
            return attention, active_set(attention, settings.top_fraction, settings.kernel)

        output = model(ids[None], use_cache=True, logits_to_keep=1)
        _, prefill = current()
        seen = prefill
        for _ in range(settings.steps):
            token = output.logits[:, -1].argmax(-1)
            if overlaps and token.item() in stops:
                break
            output = model(token[None], use_cache=True, past_key_values=output.past_key_values)
            attention, active = current()
            overlaps.append(overlap(active, prefill))
            if len(overlaps) > REFRESH:
                gains.append(caught(attention, seen[:, None]) - caught(attention, prefill[:, :, None]))
            if len(overlaps) % REFRESH == 0:
                seen = active

    # quantile, not median: torch's median takes the lower of the two middle values
    stability = torch.stack(overlaps).quantile(0.5, dim=0)
    similarity = overlap(prefill[:, :, None], prefill[:, None])
    gain = torch.stack(gains).mean(0) if gains else torch.full_like(similarity, torch.nan)
    return TextScores(stability.cpu(), similarity.cpu(), gain.cpu(), len(overlaps))


def score_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[tuple[str, str]],
    settings: ProfileSettings,
) -> list[tuple[TextScores, ProfiledText]]:
    """texts: (name, text) pairs, each cut to `settings.length` tokens; shorter ones are used whole."""
    scored = []
    for name, text in tqdm(texts, desc="profiling", unit="text"):
        has_bos = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
        ids = tokenizer(text, add_special_tokens=not has_bos).input_ids[: settings.length]
        if not ids:
            raise PolicyError(f"profile: text {name} is empty")
        scores = score_text(model, torch.tensor(ids, device=model.device), settings)
        digest = hashlib.sha256(text.encode()).hexdigest()
        scored.append((scores, ProfiledText(name=name, sha256=digest, tokens=len(ids), steps=scores.steps)))
    return scored


def average(scored: Sequence[tuple[TextScores, ProfiledText]]) -> HeadScores:
    """Scores of all texts, in one order wherever each of them was scored.

    Texts do not depend on each other and nothing is summed before this, so parts of a corpus give what the whole gives.
    """
    scores = [text for text, _ in scored]
    stability = torch.stack([text.stability for text in scores]).mean(0)
    similarity = torch.stack([text.similarity for text in scores]).mean(0)
    gain = torch.stack([text.gain for text in scores]).nanmean(0)
    return HeadScores(stability, similarity, gain, tuple(record for _, record in scored))


# ---------------------------------------------------------------- roles and budgets
def cluster_heads(similarity: Tensor, tau_sim: float) -> dict[int, tuple[int, ...]]:
    """similarity [H, H] of one layer -> {pivot: its satellites}, greedy star clustering.

    The unassigned head with the most unassigned neighbours (ties: lowest index) becomes a pivot and takes
    them all; stops when nobody has a neighbour left.
    """
    near = similarity >= tau_sim
    unassigned = list(range(len(near)))
    clusters: dict[int, tuple[int, ...]] = {}
    while unassigned:
        stars = {i: tuple(j for j in unassigned if j != i and near[i, j]) for i in unassigned}
        pivot = max(unassigned, key=lambda head: (len(stars[head]), -head))
        if not stars[pivot]:
            break
        clusters[pivot] = stars[pivot]
        unassigned = [head for head in unassigned if head != pivot and head not in stars[pivot]]
    return clusters


def followers(gain: Tensor, whole: Tensor) -> dict[int, tuple[int, ...]]:
    """gain [H, H] and bool [H], which heads are kept whole, of one layer -> {pivot: its satellites}.

    Every other head follows the whole one that it gains most by following, if it gains at all.
    """
    clusters: dict[int, tuple[int, ...]] = {}
    for head in (~whole).nonzero().flatten().tolist():
        best = gain[head].masked_fill(~whole, -torch.inf)
        if best.max() > 0:
            pivot = int(best.argmax())
            clusters[pivot] = (*clusters.get(pivot, ()), head)
    return clusters


def layer_roles(clusters: dict[int, tuple[int, ...]], whole: Tensor) -> tuple[Role, ...]:
    """Clustered heads are pivots and satellites; of the rest, those to be kept whole, bool [H], are volatile."""
    satellites = {head for members in clusters.values() for head in members}

    def role(head: int, kept: bool) -> Role:
        if head in clusters:
            return "pivot"
        if head in satellites:
            return "satellite"
        return "volatile" if kept else "anchor"

    return tuple(role(head, kept) for head, kept in enumerate(whole.tolist()))


def assign(scores: HeadScores, settings: ProfileSettings) -> tuple[list[tuple[Role, ...]], list[dict]]:
    """Roles and clusters of every layer: as published, or by what heads gain if there is a `max_drift`."""
    if settings.max_drift is None:
        whole = scores.stability < settings.tau_stable
        clusters = [cluster_heads(layer, settings.tau_sim) for layer in scores.similarity]
    else:
        if scores.gain.isnan().any():
            raise PolicyError(f"profile: --max-drift needs texts with answers of more than {REFRESH} tokens")
        whole = scores.gain.diagonal(dim1=1, dim2=2) >= settings.max_drift
        clusters = [followers(*layer) for layer in zip(scores.gain, whole, strict=True)]
    return [layer_roles(*layer) for layer in zip(clusters, whole, strict=True)], clusters


def budget_weights(roles: Sequence[Sequence[Role]], stability: Tensor) -> list[list[float]]:
    """r_i [L][H]: inverse stability, scaled to mean 1 over the compressed heads of all layers together."""
    inverse = 1.0 / (stability.double() + 1e-6)
    compressed = torch.tensor([[role not in FULL_ROLES for role in row] for row in roles])
    weights = torch.where(compressed, inverse / inverse[compressed].mean(), NO_WEIGHT)
    return weights.tolist()
