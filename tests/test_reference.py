"""The reference is checked against Hugging Face's own attention and against numbers worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from reference import (
    Full,
    HeteroCache,
    Layer,
    RandomKeep,
    Reference,
    Rule,
    SnapKV,
    Streaming,
    average_pool,
    pick,
    share_out,
)
from reference_baselines import Duo
from transformers import AutoModelForCausalLM

LAYERS, HEADS, GROUP = 3, 2, 2
STEPS = 12
EAGER = {"dtype": torch.float32, "attn_implementation": "eager"}
PROMPT = torch.randint(320, (50,), generator=torch.Generator().manual_seed(7)).tolist()
PROFILE = {
    "roles": [["pivot", "satellite"], ["anchor", "volatile"], ["satellite", "anchor"]],
    "weights": [[-1.0, 0.5], [0.75, -1.0], [1.0, 1.75]],
}
AFTER_PROMPT = [
    SnapKV(ratio=0.4, window=8),
    SnapKV(budget_tokens=20, window=4, kernel=3),
    RandomKeep(ratio=0.3, seed=3),
    Duo([[0.3, 0.1], [0.2, 0.8], [0.9, 0.3]], retrieval=0.5, sinks=3, recent=8),
    HeteroCache(PROFILE, rho=0.6, min_tokens=4),
]


@pytest.fixture(scope="module")
def reference(tiny_model_dir: Path) -> Reference:
    return Reference(tiny_model_dir)


@pytest.fixture(scope="module")
def hf(tiny_model_dir: Path):
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, **EAGER)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def hf_logits(model, tokens: list[int], visible: torch.Tensor) -> torch.Tensor:
    """One forward of all `tokens` with a bool mask [heads or 1, T, T] -> [T, vocab]."""
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    return model(torch.tensor([tokens]), attention_mask=mask[None], use_cache=False).logits[0]


def ranges(*, prompt: int, kept: list[list[list[int]]], steps: int) -> list[list[list[int]]]:
    """What was kept of the prompt and every decoded token but the last."""
    return [[row + list(range(prompt, prompt + steps - 1)) for row in layer] for layer in kept]


# ---------------------------------------------------------------------------------------- against HF


def test_full_equals_generate(reference: Reference, hf) -> None:
    out = hf.generate(
        torch.tensor([PROMPT]),
        max_new_tokens=STEPS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    replay = reference.replay(PROMPT, Full(), STEPS)
    assert replay.tokens == out.sequences[0, len(PROMPT) :].tolist()
    assert len(set(replay.tokens)) > STEPS // 2, "the tiny model repeats itself: tokens would prove nothing"
    close(replay.logits, torch.cat(out.logits))
    everything = [[list(range(len(PROMPT)))] * HEADS] * LAYERS
    assert replay.kept_after_prompt == everything
    assert replay.kept_at_end == ranges(prompt=len(PROMPT), kept=everything, steps=STEPS)


def test_small_model_equals_generate(small_model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(small_model_dir, dtype=torch.float32)
    prompt = torch.randint(5, 40000, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    out = model.generate(torch.tensor([prompt]), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert Reference(model).replay(prompt, Full(), 4).tokens == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize(("sinks", "window"), [(0, 1), (0, 9), (3, 16), (4, 47), (49, 2)])
def test_streaming_equals_masked_hf(reference: Reference, hf, sinks: int, window: int) -> None:
    replay = reference.replay(PROMPT, Streaming(sinks, window), STEPS)
    tokens = PROMPT + replay.tokens[:-1]
    visible = torch.tensor(
        [[j <= p and (j < sinks or j > p - window) for j in range(len(tokens))] for p in range(len(tokens))]
    )
    close(replay.logits, hf_logits(hf, tokens, visible[None])[len(PROMPT) - 1 :])
    for kept, last in ((replay.kept_after_prompt, len(PROMPT) - 1), (replay.kept_at_end, len(tokens) - 1)):
        assert kept == [[visible[last].nonzero().flatten().tolist()] * HEADS] * LAYERS


def test_streaming_with_a_wide_window_is_full(reference: Reference) -> None:
    full = reference.replay(PROMPT, Full(), STEPS)
    wide = reference.replay(PROMPT, Streaming(4, len(PROMPT) + STEPS - 1), STEPS)
    assert wide.tokens == full.tokens
    assert torch.equal(wide.logits, full.logits)
    assert wide.kept_at_end == full.kept_at_end


@pytest.mark.parametrize("rule", [RandomKeep(0.3, seed=1), SnapKV(0.4, window=8)], ids=repr)
def test_kept_sets_equal_masked_hf(tiny_model_dir: Path, rule: Rule) -> None:
    """Every head decodes over its own tokens; one layer, as HF takes one mask for all of them."""
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(tiny_model_dir, num_hidden_layers=1, **EAGER) for _ in range(2)
    )
    replay = Reference(ours).replay(PROMPT, rule, STEPS)
    tokens = PROMPT + replay.tokens[:-1]
    assert replay.kept_after_prompt[0][0] != replay.kept_after_prompt[0][1]
    visible = torch.ones(HEADS * GROUP, len(tokens), len(tokens), dtype=torch.bool).tril()
    for query_head in range(HEADS * GROUP):
        dropped = set(range(len(PROMPT))) - set(replay.kept_after_prompt[0][query_head // GROUP])
        visible[query_head, len(PROMPT) :, sorted(dropped)] = False
    close(replay.logits, hf_logits(theirs, tokens, visible)[len(PROMPT) - 1 :])


# --------------------------------------------------------------------------------- the ways of a request


@pytest.mark.parametrize("rule", AFTER_PROMPT, ids=lambda rule: type(rule).__name__)
def test_kept_sizes_and_decoded_tokens(reference: Reference, rule: Rule) -> None:
    full = reference.replay(PROMPT, Full(), STEPS)
    replay = reference.replay(PROMPT, rule, STEPS)
    budgets = rule.budgets(LAYERS, HEADS, len(PROMPT))
    assert [[len(row) for row in layer] for layer in replay.kept_after_prompt] == budgets
    assert replay.kept_at_end == ranges(prompt=len(PROMPT), kept=replay.kept_after_prompt, steps=STEPS)
    close(replay.logits[0], full.logits[0])  # the prompt itself is computed with full attention
    assert not torch.allclose(replay.logits[1], full.logits[1], atol=1e-2)
    assert [s.shape for s in replay.scores] == [(HEADS, len(PROMPT))] * LAYERS


@pytest.mark.parametrize("rule", [SnapKV(1.0), RandomKeep(1.0), HeteroCache(PROFILE, rho=1.0)], ids=repr)
def test_a_full_budget_is_full(reference: Reference, rule: Rule) -> None:
    assert torch.equal(reference.replay(PROMPT, rule, STEPS).logits, reference.replay(PROMPT, Full(), STEPS).logits)


def test_forcing_its_own_tokens_changes_nothing(reference: Reference) -> None:
    free = reference.replay(PROMPT, SnapKV(0.5, window=8), STEPS)
    forced = reference.replay(PROMPT, SnapKV(0.5, window=8), STEPS, force_tokens=free.tokens)
    assert forced.tokens == free.tokens
    assert torch.equal(forced.logits, free.logits)


def test_forced_tokens_are_followed(reference: Reference, hf) -> None:
    answer = list(range(100, 100 + STEPS))
    replay = reference.replay(PROMPT, Full(), STEPS, force_tokens=answer)
    tokens = PROMPT + answer[:-1]
    causal = torch.ones(1, len(tokens), len(tokens), dtype=torch.bool).tril()
    close(replay.logits, hf_logits(hf, tokens, causal)[len(PROMPT) - 1 :])
    assert replay.tokens == replay.logits.argmax(-1).tolist()
    started = reference.replay(PROMPT, Full(), STEPS, force_tokens=answer[:3])
    assert torch.equal(started.logits[:4], replay.logits[:4])
    continued = reference.replay(PROMPT + answer[:3], Full(), STEPS - 3)
    assert started.tokens[3:] == continued.tokens


@pytest.mark.parametrize("rule", [Full(), Streaming(2, 20)], ids=repr)
@pytest.mark.parametrize("at", [0, 1, 7, STEPS - 1])
def test_resuming_by_positions_is_undisturbed(reference: Reference, rule: Rule, at: int) -> None:
    calm = reference.replay(PROMPT, rule, STEPS)
    resumed = reference.replay(PROMPT, rule, STEPS, resume_at=len(PROMPT) + at)
    assert resumed.tokens == calm.tokens
    close(resumed.logits, calm.logits)
    assert resumed.kept_at_end == calm.kept_at_end


@pytest.mark.parametrize("rule", AFTER_PROMPT, ids=lambda rule: type(rule).__name__)
def test_resuming_makes_the_answer_a_prompt(reference: Reference, rule: Rule) -> None:
    calm = reference.replay(PROMPT, rule, STEPS)
    resumed = reference.replay(PROMPT, rule, STEPS, resume_at=len(PROMPT) + 5)
    fresh = reference.replay(PROMPT + calm.tokens[:5], rule, STEPS - 5)
    assert resumed.tokens == calm.tokens[:5] + fresh.tokens
    assert torch.equal(resumed.logits, torch.cat([calm.logits[:5], fresh.logits]))
    assert resumed.kept_after_prompt == fresh.kept_after_prompt
    assert resumed.kept_at_end == fresh.kept_at_end


def test_resuming_outside_the_answer_is_an_error(reference: Reference) -> None:
    with pytest.raises(ValueError, match="resume_at must be in 50..61, not 62"):
        reference.replay(PROMPT, Full(), STEPS, resume_at=len(PROMPT) + STEPS)


# ----------------------------------------------------------------------------------------- worked by hand


def hand_layer() -> Layer:
    """One KV head, two query heads, d = 1: the first attends in proportion to exp(key), the second evenly.

    exp(key) = 1 2 4 1 3 5. The query at 4 sees the first five (sum 11), the query at 5 all six (sum 16).
    """
    keys = torch.tensor([1.0, 2, 4, 1, 3, 5]).log().view(1, 6, 1)
    queries = torch.cat([torch.ones(1, 6, 1), torch.zeros(1, 6, 1)])
    return Layer(queries, keys, keys, torch.ones(1, 6, dtype=torch.bool), 1.0, torch.zeros(1, 6))


def test_snapkv_by_hand() -> None:
    rule = SnapKV(budget_tokens=3, window=2, kernel=3)
    scores = rule.scores(0, hand_layer())[0]
    peaked, even = (1 / 11 + 1 / 16) / 2, (1 / 5 + 1 / 6) / 2
    # Pooled with zeros outside positions 0..3: 3 7 7 5 thirds, and 2 3 3 2 thirds.
    expected = [(a / 3 * peaked + b / 3 * even) / 2 for a, b in ((3, 2), (7, 3), (7, 3), (5, 2))]
    assert scores.tolist() == pytest.approx([*expected, math.inf, math.inf])
    assert pick(scores, 3, rule.newest) == [1, 4, 5]  # 1 and 2 tie: the earlier one
    assert pick(scores, 5, rule.newest) == [1, 2, 3, 4, 5]
    assert pick(scores, 1, rule.newest) == [5]  # a budget below the window keeps its newest tokens


def test_snapkv_with_a_window_over_the_prompt() -> None:
    scores = SnapKV(window=64).scores(0, hand_layer())[0]
    assert pick(scores, 4, 64) == [2, 3, 4, 5]


def test_heterocache_score_by_hand() -> None:
    rule = HeteroCache(PROFILE, window=1, kernel=3)
    # Last query: 1 2 4 1 3 5 sixteenths and 1 sixth each; pooled over the whole prompt; maximum of the two.
    peaked = [a / 48 for a in (3, 7, 7, 8, 9, 8)]
    even = [a / 18 for a in (2, 3, 3, 3, 3, 2)]
    expected = [max(a, b) for a, b in zip(peaked, even, strict=True)]
    assert rule.scores(0, hand_layer())[0].tolist() == pytest.approx(expected)


def test_heterocache_window_averages_queries() -> None:
    scores = HeteroCache(PROFILE, window=2, kernel=1).scores(0, hand_layer())[0]
    peaked = [a * (1 / 11 + 1 / 16) / 2 for a in (1, 2, 4, 1, 3)] + [5 / 16 / 2]
    even = [(1 / 5 + 1 / 6) / 2] * 5 + [1 / 12]
    assert scores.tolist() == pytest.approx([max(a, b) for a, b in zip(peaked, even, strict=True)])


def test_average_pool() -> None:
    assert average_pool(torch.tensor([5.0, 0, 0, 0, 10]), 5).tolist() == [1.0, 1.0, 3.0, 2.0, 2.0]
    assert average_pool(torch.tensor([3.0, 6]), 1).tolist() == [3.0, 6.0]
    assert average_pool(torch.tensor([4.0, 8, 12]), 2).tolist() == [2.0, 6.0, 10.0]  # reaches back, not ahead
    assert average_pool(torch.empty(0), 5).tolist() == []


def test_random_draws_differ_by_layer_head_and_seed() -> None:
    empty = torch.zeros(2, 9, 1)
    layer = Layer(empty, empty, empty, torch.ones(2, 9, dtype=torch.bool), 1.0, torch.zeros(2, 9))
    rows = [row.tolist() for seed in (0, 1) for i in (0, 1) for row in RandomKeep(0.5, seed).scores(i, layer)]
    assert len({tuple(row) for row in rows}) == 8
    expected = torch.rand(9, generator=torch.Generator().manual_seed(1_000_003 * 1_000_003 + 1_000_003 + 1))
    assert rows[7] == expected.tolist()


# ------------------------------------------------------------------------------------------------ budgets


@pytest.mark.parametrize(
    ("total", "weights", "low", "high", "expected"),
    [
        (40, [0.5, 0.75, 1.0, 1.75], 1, 100, [5, 8, 10, 17]),  # 5, 7.5, 10, 17.5: a tie goes to the earlier
        (41, [1.0, 1.0, 1.0], 1, 100, [14, 14, 13]),
        (40, [0.5, 0.75, 1.0, 1.75], 1, 12, [6, 10, 12, 12]),  # 17.5 is cut; then 12.4 is
        (40, [1.0, 1.0, 10.0], 8, 100, [8, 8, 24]),
        (30, [1.0, 2.0, 100.0], 4, 20, [4, 6, 20]),  # both bounds at once
        (10, [1.0, 2.0], 8, 20, [8, 8]),  # below what the bounds allow
        (90, [1.0, 2.0], 8, 20, [20, 20]),  # above it
        (14, [0.0, 0.0, 1.0], 1, 8, [3, 3, 8]),
        (9, [0.0, 1.0], 2, 20, [2, 7]),
        (0, [], 1, 8, []),
    ],
)
def test_share_out(total: int, weights: list[float], low: int, high: int, expected: list[int]) -> None:
    assert share_out(total, weights, low, high) == expected


def test_share_out_sum_bounds_and_weights() -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        count = int(torch.randint(1, 20, (1,), generator=generator))
        high = int(torch.randint(1, 200, (1,), generator=generator))
        low = min(16, high)
        total = int(torch.randint(0, count * high + 20, (1,), generator=generator))
        weights = (torch.rand(count, generator=generator, dtype=torch.float64) * 2 + 0.05).tolist()
        shares = share_out(total, weights, low, high)
        assert sum(shares) == min(max(total, count * low), count * high)
        assert all(low <= share <= high for share in shares)
        # Heads strictly between the bounds get the same per weight, up to rounding, and no clipped head
        # would get its bound otherwise.
        scales = [((s - 1) / w, (s + 1) / w) for s, w in zip(shares, weights, strict=True) if low < s < high]
        if scales:
            least, most = max(a for a, _ in scales), min(b for _, b in scales)
            assert least < most
            for share, weight in zip(shares, weights, strict=True):
                assert share != high or low == high or (share - 1) / weight < most
                assert share != low or low == high or (share + 1) / weight > least


def test_heterocache_budgets() -> None:
    # 2 of 6 heads are full; 0.625 * 6 - 2 = 1.75 heads of 100 tokens give 21.9, 32.8, 43.8 and 76.6.
    assert HeteroCache(PROFILE, rho=0.625).budgets(3, 2, 100) == [[100, 22], [33, 100], [44, 76]]
    # 2.5 heads: 31.25, 46.9, 62.5 and 109.4, clipped at 100; the rest is shared by weight again.
    budgets = HeteroCache(PROFILE, rho=0.75).budgets(3, 2, 100)
    assert budgets == [[100, 33], [50, 100], [67, 100]]
    # A prompt shorter than min_tokens is kept whole.
    assert HeteroCache(PROFILE, rho=0.4).budgets(3, 2, 10) == [[10, 10]] * 3
