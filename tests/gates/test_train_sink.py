import pytest
import torch
from gates.gate_tools import HEADS, HIDDEN, LAYERS, QUERY_HEADS, VOCAB, backbone_of, tiny_llama
from gates.reference_gates import reconstruction_score

from vllm_kvplug.errors import PolicyError
from vllm_kvplug.gates import targets, train_sink
from vllm_kvplug.gates.backbone import attention_replaced
from vllm_kvplug.gates.sink_gate import SinkGate
from vllm_kvplug.gates.targets import Frame, chunk_scores, hidden_states, reconstruction_targets
from vllm_kvplug.gates.train_sink import (
    SinkTraining,
    _layers_a_group,
    rank_correlation,
    rate,
    recall,
    sink_step,
    train_sink_gate,
)
from vllm_kvplug.gates.training import Checkpoint
from vllm_kvplug.spread import Spread

GROUP = QUERY_HEADS // HEADS
FRAME = Frame(torch.tensor([1, 2, 3]), torch.tensor([4, 5]), torch.tensor([6, 7, 8]), torch.tensor([9]))


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


# ---------------------------------------------------------------- targets
def test_repetitions():
    context = torch.arange(20, 45)
    first, second, third = FRAME.repetitions(context, 10)
    assert first[:2] == (0, 10) and first[2].tolist() == [4, 5, 9, *range(20, 30)]
    assert second[:2] == (10, 20) and second[2].tolist() == [6, 7, 8, *range(22, 30), 9, *range(30, 40)]
    assert third[:2] == (20, 25) and third[2].tolist() == [6, 7, 8, *range(32, 40), 9, *range(40, 45)]


@pytest.mark.parametrize("block", [4, 256])
def test_chunk_scores_are_the_loop(monkeypatch, block):
    monkeypatch.setattr(targets, "QUERY_BLOCK", block)
    torch.manual_seed(0)
    query, key = torch.randn(HEADS, GROUP, 9, 8), torch.randn(HEADS, 3 + 20 + 9, 8)
    scores = chunk_scores(query, key, before=3, first=8, last=15, scale=0.6)
    for head in range(HEADS):
        expected = reconstruction_score(query[head], key[head], 3, 8, 15, 0.6)
        torch.testing.assert_close(scores[head], torch.tensor(expected), atol=1e-5, rtol=0)


@torch.no_grad()
def naive_targets(model, context: torch.Tensor, chunk: int) -> torch.Tensor:
    """No cache: a whole forward pass over [before | context | repetition] for each chunk."""
    found = []
    for first, last, repetition in FRAME.repetitions(context, chunk):
        everything = torch.cat([FRAME.before, context, repetition])
        seen, own = {}, len(repetition)

        def record(module, query, key, value, attention_mask, scaling=None, seen=seen, own=own, **kwargs):
            seen[module.layer_idx] = (query[0, :, -own:], key[0], scaling)
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scaling, enable_gqa=True
            ).transpose(1, 2), None

        with attention_replaced(model, "test_record", record):
            model.base_model(everything[None], use_cache=False)
        rows = []
        for query, key, scale in seen.values():
            grouped = query.unflatten(0, (HEADS, GROUP))
            place = (3 + first, 3 + last)
            rows.append([reconstruction_score(grouped[h], key[h], 3, *place, scale) for h in range(HEADS)])
        found.append(torch.tensor(rows))
    return torch.cat(found, dim=-1)


def test_targets_are_those_of_a_naive_replay(model):
    torch.manual_seed(1)
    context = torch.randint(VOCAB, (23,))
    got = reconstruction_targets(model, FRAME, context, chunk=9)
    assert got.shape == (LAYERS, HEADS, 23) and got.dtype == torch.float32
    torch.testing.assert_close(got, naive_targets(model, context, 9), atol=2e-5, rtol=0)
    assert got.std() > 0.05
    assert model.config._attn_implementation == "sdpa"


def test_frame_of_a_chat_template():
    class Tokenizer:
        bos_token, chat_template = "<s>", "something"

        def apply_chat_template(self, message, tokenize, add_generation_prompt):
            assert (tokenize, add_generation_prompt) == (False, True)
            return f"SYSTEM<u>{message[0]['content']}</u><a>"

        def __call__(self, text, add_special_tokens):
            assert not add_special_tokens
            return type("Encoded", (), {"input_ids": [ord(letter) for letter in text]})

    def text(ids):
        return "".join(map(chr, ids.tolist()))

    tokenizer = Tokenizer()
    frame = Frame.of(tokenizer)
    assert (text(frame.before), text(frame.answer)) == ("SYSTEM<u>", "</u><a>")
    assert text(frame.first) == "\n\nRepeat the previous context exactly."
    assert text(frame.later) == "\n\nRepeat the part of the previous context exactly, starting with "
    tokenizer.chat_template = None
    assert (text(Frame.of(tokenizer).before), text(Frame.of(tokenizer).answer)) == ("<s>", "\n")


def test_hidden_states_are_behind_the_layer_norm(model):
    torch.manual_seed(2)
    contexts = list(torch.randint(VOCAB, (2, 11)))
    got = hidden_states(model, FRAME, contexts, slice(1, 3))
    assert got.shape == (2, 22, HIDDEN)
    for n, context in enumerate(contexts):
        with torch.no_grad():
            ids = torch.cat([FRAME.before, context])[None]
            entering = model(ids, output_hidden_states=True).hidden_states
            for row, layer in enumerate((1, 2)):
                expected = model.base_model.layers[layer].input_layernorm(entering[layer])[0, 3:]
                torch.testing.assert_close(got[row, 11 * n : 11 * n + 11], expected, atol=1e-5, rtol=0)


# ---------------------------------------------------------------- measures
def test_rank_correlation():
    a = torch.tensor([[1.0, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 1, 2, 2, 3]])
    b = torch.tensor([[9.0, 10, 11, 50, 99], [5, 4, 3, 2, 1], [2, 1, 4, 3, 5], [2, 1, 2, 4, 5]])
    # the last two by hand: 1 - 6*4/(5*24), and Pearson's correlation of the ranks with ties shared
    ties = torch.corrcoef(torch.tensor([[1.5, 1.5, 3.5, 3.5, 5], [2.5, 1, 2.5, 4, 5]]))[0, 1].item()
    assert rank_correlation(a, b).tolist() == pytest.approx([1, -1, 0.8, ties])
    assert rank_correlation(torch.ones(1, 5), a[:1]).tolist() == [0]


def test_recall():
    wanted = torch.arange(10.0)
    assert recall(wanted, wanted, 0.3) == 1
    assert recall(-wanted, wanted, 0.3) == 0
    assert recall(torch.tensor([9.0, 0, 0, 0, 0, 0, 0, 0, 8, 7]), wanted, 0.3) == pytest.approx(2 / 3)


def test_learning_rate_is_the_released_schedule():
    rates = {step: rate(5000, 0.2, step) / 0.2 for step in (0, 1, 49, 50, 2499, 2500, 3749, 3750, 4999)}
    expected = {0: 0, 1: 0.01, 49: 0.49, 50: 1, 2499: 1, 2500: 0.5, 3749: 0.5, 3750: 0.25, 4999: 0.25}
    assert rates == pytest.approx(expected)


def test_loss_is_soft_cross_entropy_over_layers_and_heads():
    torch.manual_seed(0)
    gate = SinkGate(LAYERS, HEADS, GROUP, HIDDEN)
    hidden, wanted = torch.randn(LAYERS, 5, HIDDEN), torch.rand(LAYERS, HEADS, 5)
    seen = sink_step(gate, hidden, wanted)
    scores = gate.score(slice(None), hidden)
    losses = -(wanted * scores.log() + (1 - wanted) * (1 - scores).log())
    assert seen["loss"] == pytest.approx(losses.mean(-1).sum().item() / LAYERS, rel=1e-5)
    alone = gate.part(slice(1, 2))
    sink_step(alone, hidden[1:2], wanted[1:2])
    torch.testing.assert_close(gate.projection.grad[1:2], alone.projection.grad)  # no layer hangs on another


# ---------------------------------------------------------------- runs
@pytest.fixture(scope="module")
def contexts():
    torch.manual_seed(4)
    return list(torch.randint(VOCAB, (5, 800)))


def train(model, contexts, folder, memory=1e9, every=1000, **changes):
    torch.manual_seed(0)
    gate = SinkGate(LAYERS, HEADS, GROUP, HIDDEN)
    settings = SinkTraining(**({"steps": 150, "batch": 400, "chunk": 400} | changes))
    checkpoint = Checkpoint(folder, "same", every)
    return gate, *train_sink_gate(backbone_of(model), gate, contexts, FRAME, settings, checkpoint, memory, Spread())


def test_training_lowers_the_loss_and_ranks_held_out_tokens(model, contexts, tmp_path):
    _, _, untrained = train(model, contexts, tmp_path / "untrained", steps=1)  # the first step's rate is 0
    _, history, results = train(model, contexts, tmp_path / "trained")
    losses = history["loss"]
    assert len(losses) == 150 and sum(losses[-20:]) < 0.9 * sum(losses[:20])
    for name in ("loss", "rank_correlation", "recall30"):
        assert len(results[f"{name}_of_layers"]) == LAYERS
        assert results[name] == pytest.approx(sum(results[f"{name}_of_layers"]) / LAYERS)
    assert results["loss"] < untrained["loss"]
    assert results["rank_correlation"] > max(0.3, untrained["rank_correlation"] + 0.2)  # noise of 6 heads is 0.07
    assert results["recall30"] > untrained["recall30"]


def test_held_out_tokens_are_never_trained_on(model, contexts, tmp_path, monkeypatch):
    step, seen = train_sink.sink_step, []

    def watching(gate, hidden, targets):
        seen.append(hidden[0])
        return step(gate, hidden, targets)

    monkeypatch.setattr(train_sink, "sink_step", watching)
    train(model, contexts[:1], tmp_path, steps=2, batch=396)  # one pass over the 792 of 800 tokens
    trained = [tuple(row) for row in torch.cat(seen).tolist()]
    inputs = hidden_states(model, FRAME, contexts[:1], slice(0, 1))[0].tolist()
    assert sorted(trained) == sorted(tuple(row) for place, row in enumerate(inputs) if place % 100)


def test_layers_in_groups_are_layers_together(model, contexts, tmp_path):
    short = {"steps": 10}
    together, history, results = train(model, contexts[:1], tmp_path / "a", **short)
    bytes_of_two_layers = 2 * 800 * HIDDEN * 4
    grouped, other_history, other_results = train(
        model, contexts[:1], tmp_path / "b", memory=bytes_of_two_layers, **short
    )
    assert sorted(file.name for file in (tmp_path / "b").iterdir()) == ["layers-0-2", "layers-2-3", "targets"]
    for a, b in zip(together.parameters(), grouped.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    assert history["loss"] == pytest.approx(other_history["loss"], rel=1e-5)
    assert results["rank_correlation_of_layers"] == pytest.approx(other_results["rank_correlation_of_layers"], abs=1e-3)


@pytest.mark.parametrize(
    "files, fit, slots, expected",
    [
        ([], 9, 1, 5),
        ([], 9, 2, 3),
        ([], 2, 1, 2),
        (["layers-0-2", "targets"], 9, 1, 2),
        (["layers-2-4", "layers-4-5", "layers-0-2.tmp"], 9, 1, 2),
        (["layers-4-5"], 9, 2, 3),  # the last group, which does not say how large the others were
        (["layers-0-5"], 9, 2, 5),
        (["layers-0-5"], 4, 2, 4),
    ],
)
def test_groups_are_those_of_an_earlier_run(tmp_path, files, fit, slots, expected):
    for name in files:
        (tmp_path / name).touch()
    assert _layers_a_group(tmp_path, fit, layers=5, slots=slots) == expected


class Stop(Exception):
    pass


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(model, contexts, tmp_path, monkeypatch):
    memory, short = 2 * 800 * HIDDEN * 4, {"steps": 10}
    whole, history, results = train(model, contexts[:1], tmp_path / "whole", memory, **short)
    step, done = train_sink.sink_step, []

    def stopping(*args):
        done.append(0)
        if len(done) > 16:
            raise Stop
        return step(*args)

    monkeypatch.setattr(train_sink, "sink_step", stopping)
    with pytest.raises(Stop):  # the first two layers are done, the third is at step 6
        train(model, contexts[:1], tmp_path / "cut", memory, every=4, **short)
    done.clear()
    monkeypatch.setattr(train_sink, "reconstruction_targets", None)  # they are read from the file
    resumed, continued, again = train(model, contexts[:1], tmp_path / "cut", memory, every=4, **short)
    assert len(done) == 6
    assert (continued, again) == (history, results)
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_progress_of_another_run_is_refused(model, contexts, tmp_path):
    train(model, contexts[:1], tmp_path, steps=1)
    settings, gate = SinkTraining(steps=1), SinkGate(LAYERS, HEADS, GROUP, HIDDEN)

    def again(checkpoint):
        train_sink_gate(backbone_of(model), gate, contexts[:1], FRAME, settings, checkpoint, 1e9, Spread())

    with pytest.raises(PolicyError, match="run with other settings.*--out"):
        again(Checkpoint(tmp_path, "other"))
    (tmp_path / "targets").unlink()
    with pytest.raises(PolicyError, match="layers-0-3 is from a run with other settings.*--out"):
        again(Checkpoint(tmp_path, "other"))
