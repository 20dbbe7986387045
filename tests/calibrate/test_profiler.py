import argparse
import json
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from vllm_kvplug.calibrate import command
from vllm_kvplug.calibrate.profile import HeadProfile, ProfileSettings, model_fingerprint
from vllm_kvplug.calibrate.profiler import (
    HeadScores,
    active_set,
    assign,
    budget_weights,
    cluster_heads,
    followers,
    last_rows,
    layer_roles,
    overlap,
    score_text,
    stack_rows,
)
from vllm_kvplug.errors import PolicyError

VOCAB = 64


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCAB,
        initializer_range=0.5,  # sharp attention, so that a wrong row cannot pass for a right one
        eos_token_id=None,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def generate(model: LlamaForCausalLM, ids: torch.Tensor, tokens: int) -> torch.Tensor:
    # the mask is given because generate() would otherwise hide every token 0 as padding
    everything = torch.ones_like(ids[None])
    return model.generate(ids[None], attention_mask=everything, max_new_tokens=tokens, do_sample=False)


def positions(active: torch.Tensor) -> list[int]:
    return active.flatten().nonzero().flatten().tolist()


def mask(*positions: int, size: int = 10) -> torch.Tensor:
    out = torch.zeros(size, dtype=torch.bool)
    out[list(positions)] = True
    return out


# ---------------------------------------------------------------- capture
@torch.inference_mode()
def test_rows_equal_eager_attention(model):
    prompt = torch.randint(VOCAB, (1, 23))
    tokens = torch.randint(VOCAB, (3, 1, 1))
    with last_rows(model) as rows:
        cache = model(prompt, use_cache=True).past_key_values
        seen = [torch.stack([rows[layer][0] for layer in range(3)])]
        for token in tokens:
            model(token, use_cache=True, past_key_values=cache)
            seen.append(torch.stack([rows[layer][0] for layer in range(3)]))

    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    output = model(torch.cat([prompt, *tokens], dim=1), output_attentions=True)
    model.set_attn_implementation(before)
    expected = torch.stack([attention[0] for attention in output.attentions])  # [L, Hq, T, T]
    for step, row in enumerate(seen):
        keys = prompt.shape[1] + step
        torch.testing.assert_close(row, expected[:, :, keys - 1, :keys], atol=1e-5, rtol=0)


@torch.inference_mode()
def test_capture_leaves_the_model_as_it_was(model):
    prompt = torch.randint(VOCAB, (1, 9))
    before, logits = model.config._attn_implementation, model(prompt).logits
    with last_rows(model) as rows:
        torch.testing.assert_close(model(prompt).logits, logits)
    assert model.config._attn_implementation == before
    rows.clear()
    model(prompt)
    assert not rows


def test_sliding_windows_are_refused(model):
    model.config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
    try:
        with pytest.raises(PolicyError, match="sliding_attention"), last_rows(model):
            pass
    finally:
        del model.config.layer_types


def test_stack_rows_takes_the_group_mean_over_prompt_keys():
    rows = {1: torch.full((1, 4, 6), 2.0), 0: torch.arange(4.0).view(1, 4, 1).expand(1, 4, 6)}
    stacked = stack_rows(rows, kv_heads=2, prompt=5)
    assert stacked.shape == (2, 2, 5)
    assert stacked[0, :, 0].tolist() == [0.5, 2.5]
    assert (stacked[1] == 2.0).all()


# ---------------------------------------------------------------- scores
def test_active_set_of_a_peak_is_its_smoothed_neighbourhood():
    row = torch.zeros(1, 1, 20)
    row[..., 10] = 1.0
    assert positions(active_set(row, top_fraction=0.25, kernel=5)) == [
        8,
        9,
        10,
        11,
        12,
    ]


def test_active_set_ties_go_to_early_positions_and_one_is_kept():
    row = torch.ones(1, 1, 10)
    assert positions(active_set(row, top_fraction=0.3, kernel=1)) == [0, 1, 2]
    assert active_set(row, top_fraction=0.01, kernel=1).sum() == 1


def test_zero_padding_lowers_the_edges():
    row = torch.ones(1, 1, 10)
    assert positions(active_set(row, top_fraction=0.6, kernel=5)) == [
        2,
        3,
        4,
        5,
        6,
        7,
    ]


def test_overlap():
    assert overlap(mask(1, 2, 3), mask(1, 2, 3)) == 1
    assert overlap(mask(1, 2, 3, 4), mask(3, 4, 5, 6)) == 0.5
    assert overlap(mask(1, 2), mask(3, 4)) == 0
    assert overlap(mask(1, 2), mask(1, 2, 3, 4)) == 1  # relative to the smaller set
    pairwise = overlap(torch.stack([mask(1, 2), mask(2, 3)])[:, None], torch.stack([mask(1, 2), mask(2, 3)]))
    assert pairwise.tolist() == [[1, 0.5], [0.5, 1]]


def test_score_text_counts_steps_and_is_one_when_everything_is_active(model):
    ids = torch.randint(VOCAB, (17,))
    scores = score_text(model, ids, ProfileSettings(steps=6, top_fraction=1.0))
    assert scores.steps == 6
    assert scores.stability.shape == (3, 2) and (scores.stability == 1).all()
    assert scores.similarity.shape == (3, 2, 2) and (scores.similarity == 1).all()
    assert scores.gain.shape == (3, 2, 2) and scores.gain.abs().max() < 1e-6


def test_score_text_equals_the_slow_way(model):
    ids = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(2))
    settings = ProfileSettings(steps=12, top_fraction=0.2, kernel=3)
    scores = score_text(model, ids, settings)

    with torch.inference_mode():
        text = generate(model, ids, 13)
        model.set_attn_implementation("eager")
        attentions = model(text, output_attentions=True).attentions
        model.set_attn_implementation("sdpa")

    def active(layer: int, head: int, query: int) -> set[int]:
        row = attentions[layer][0, 3 * head : 3 * head + 3, query, :40].mean(0)
        padded = torch.cat([torch.zeros(1), row, torch.zeros(1)])
        smooth = [padded[i : i + 3].mean().item() for i in range(40)]
        return set(sorted(range(40), key=lambda i: -smooth[i])[:8])

    def caught(layer: int, head: int, query: int, tokens: set[int]) -> float:
        row = attentions[layer][0, 3 * head : 3 * head + 3, query, :40].mean(0)
        return (row[sorted(tokens)].sum() / row.sum()).item()

    for layer in range(3):
        prefill = [active(layer, head, 39) for head in range(2)]
        for head in range(2):
            shared = sorted(len(prefill[head] & active(layer, head, query)) / 8 for query in range(40, 52))
            assert scores.stability[layer, head].item() == pytest.approx((shared[5] + shared[6]) / 2)
            for pivot in range(2):  # the query at 44 + 5n is looked at, and followed by the next five
                gains = [
                    caught(layer, head, query, active(layer, pivot, (query - 40) // 5 * 5 + 39))
                    - caught(layer, head, query, prefill[head])
                    for query in range(45, 52)
                ]
                assert scores.gain[layer, head, pivot].item() == pytest.approx(sum(gains) / 7, abs=1e-5)
        shared = len(prefill[0] & prefill[1]) / 8
        assert scores.similarity[layer, 0, 1].item() == scores.similarity[layer, 1, 0].item() == pytest.approx(shared)


def test_short_answers_have_no_gain(model):
    scores = score_text(model, torch.randint(VOCAB, (12,)), ProfileSettings(steps=5))
    assert scores.gain.isnan().all()


def test_score_text_stops_at_the_end_token(model):
    ids = torch.randint(VOCAB, (12,))
    generated = generate(model, ids, 8)[0, 12:].tolist()
    stop = next(token for token in generated[1:] if token != generated[0])
    model.generation_config.eos_token_id = [stop]
    try:
        steps = score_text(model, ids, ProfileSettings(steps=8)).steps
    finally:
        model.generation_config.eos_token_id = None
    assert steps == generated.index(stop)


# ---------------------------------------------------------------- roles and budgets
def graph(size: int, *edges: tuple[int, int]) -> torch.Tensor:
    similarity = torch.eye(size)
    for i, j in edges:
        similarity[i, j] = similarity[j, i] = 0.5
    return similarity


@pytest.mark.parametrize(
    "similarity, clusters",
    [
        (graph(4), {}),
        (graph(1), {}),
        (graph(3, (0, 1), (1, 2)), {1: (0, 2)}),
        (graph(3, (0, 1), (0, 2), (1, 2)), {0: (1, 2)}),  # all tie: lowest index leads
        (graph(4, (2, 3), (0, 1)), {0: (1,), 2: (3,)}),
        # 3 has the highest degree; what it takes no longer counts for 0, so 0 is left with 1
        (graph(7, (0, 1), (0, 4), (3, 4), (3, 5), (3, 6)), {3: (4, 5, 6), 0: (1,)}),
        # 1 and 2 tie; 1 leads and takes 2, which leaves 3 alone
        (graph(4, (0, 1), (1, 2), (2, 3)), {1: (0, 2)}),
    ],
)
def test_greedy_star_clustering(similarity, clusters):
    assert cluster_heads(similarity, 0.5) == clusters
    assert list(cluster_heads(similarity, 0.5)) == list(clusters)
    assert cluster_heads(similarity, 0.51) == {}


GAIN = torch.tensor([[0.2, 0.1, -0.1, 0.3], [0.01, 0.2, -0.1, 0.0], [-0.1, 0.05, 0.0, 0.06], [0.1, 0.1, 0.1, 0.15]])


def test_heads_follow_whom_they_gain_most_by_following():
    """Gain [i, j] is i's of following j."""

    def clusters(*whole: int) -> dict[int, tuple[int, ...]]:
        return followers(GAIN, torch.tensor([head in whole for head in range(4)]))

    assert clusters(0, 1, 3) == {3: (2,)}
    assert clusters(1) == {1: (0, 2, 3)}
    assert clusters(0) == {0: (1, 3)}  # 2 would lose
    assert clusters(2) == {2: (3,)}
    assert clusters() == clusters(0, 1, 2, 3) == {}


def test_roles_by_gain():
    scores = HeadScores(torch.ones(1, 4), torch.ones(1, 4, 4), GAIN[None], ())
    roles, clusters = assign(scores, ProfileSettings(max_drift=0.18))
    assert roles == [("pivot", "pivot", "satellite", "satellite")] and clusters == [{1: (2,), 0: (3,)}]
    roles, clusters = assign(scores, ProfileSettings(max_drift=0.01))
    assert roles == [("volatile", "volatile", "satellite", "pivot")] and clusters == [{3: (2,)}]
    with pytest.raises(PolicyError, match="answers of more than 5 tokens"):
        assign(replace(scores, gain=torch.full((1, 4, 4), torch.nan)), ProfileSettings(max_drift=0.01))


def test_layer_roles_look_at_stability_only_outside_clusters():
    roles = layer_roles({1: (0, 3)}, torch.tensor([0.1, 0.1, 0.5, 0.9, 0.49]) < 0.5)
    assert roles == ("satellite", "pivot", "anchor", "satellite", "volatile")


def test_weights_are_inverse_stability_with_mean_one_over_all_layers():
    roles = [["pivot", "satellite"], ["anchor", "volatile"], ["anchor", "anchor"]]
    stability = torch.tensor([[0.9, 0.4], [0.8, 0.1], [0.5, 0.5]])
    weights = budget_weights(roles, stability)
    assert weights[0][0] == weights[1][1] == -1
    compressed = [weights[0][1], weights[1][0], *weights[2]]
    assert sum(compressed) / 4 == pytest.approx(1)
    assert weights[0][1] / weights[1][0] == pytest.approx(2, rel=1e-4)


# ---------------------------------------------------------------- the command
@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny-model")
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    model.save_pretrained(path)
    return path


def test_command_writes_a_profile_and_a_picture(model, folder, tmp_path, capsys):
    words = " ".join(f"w{i % VOCAB}" for i in range(0, 300, 7))
    (tmp_path / "plain.txt").write_text(words)
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": f"{words} w{i}"}) + "\n" for i in (1, 2)))
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    files = [str(tmp_path / "plain.txt"), str(tmp_path / "lines.jsonl")]
    options = ["--length", "24", "--steps", "3", "--tau-sim", "0.3", "--tau-stable", "0.2"]
    out, png = tmp_path / "tiny.json", tmp_path / "tiny.png"
    pytest.importorskip("matplotlib")
    args = parser.parse_args([str(folder), "--texts", *files, *options, "--out", str(out), "--png", str(png)])
    assert command.run(args) == 0

    profile = HeadProfile.load(out)
    assert profile.model.name == folder.name
    assert profile.model.fingerprint == model_fingerprint(model.config)
    assert (profile.model.layers, profile.model.kv_heads, profile.model.query_heads) == (3, 2, 6)
    texts = profile.provenance.texts
    assert [text.name for text in texts] == ["plain.txt", "lines.jsonl:1", "lines.jsonl:2"]
    assert {(text.tokens, text.steps) for text in texts} == {(24, 3)}
    assert profile.provenance.settings == ProfileSettings(length=24, steps=3, tau_sim=0.3, tau_stable=0.2)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert f"head profile of {folder.name}" in capsys.readouterr().out


def test_texts_without_a_text_field_are_refused(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(ValueError, match="bad.jsonl:1"):
        command.read_texts([tmp_path / "bad.jsonl"])


def test_bad_options_are_refused_before_the_model_is_loaded(tmp_path):
    (tmp_path / "a.txt").write_text("w1")
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    for file, kernel, message in (("a.txt", "4", "kernel must be odd"), ("missing.txt", "5", "missing.txt")):
        args = parser.parse_args(["no-model", "--texts", str(tmp_path / file), "--kernel", kernel])
        with pytest.raises(PolicyError, match=message):
            command.run(args)


def test_smallest_rho_is_feasible_and_barely_so():
    roles = [["pivot", "satellite", "volatile"]] * 30
    profile = HeadProfile.model_validate(
        {
            "model": dict(name="m", fingerprint="f", layers=30, kv_heads=3, query_heads=9, head_dim=64),
            "roles": roles,
            "weights": [[-1, 1, -1]] * 30,
            "clusters": [{0: [1]}] * 30,
            "provenance": {"source": "test", "date": "2026-01-01"},
        }
    )
    ratio = profile.smallest_rho
    assert int(ratio * 90) > profile.num_full == 60
    assert int((ratio - 0.01) * 90) <= 60
