import pytest
import torch
from gates.gate_tools import HEAD_DIM, HEADS, LAYERS, QUERY_HEADS, VOCAB, shaken, tiny_llama
from gates.reference_gates import gated_row
from torch.nn.attention import SDPBackend, sdpa_kernel

from vllm_kvplug.gates import train_write
from vllm_kvplug.gates.backbone import attention_replaced
from vllm_kvplug.gates.train_write import (
    WriteTraining,
    evaluate,
    gated_attention,
    hidden_distance,
    layers_recomputed,
    own_gates,
    rate,
    sparsity_loss,
    train_write_gate,
    write_gated,
    write_step,
)
from vllm_kvplug.gates.training import Checkpoint
from vllm_kvplug.gates.write_gate import WriteGate
from vllm_kvplug.rotary import Rotary

TOKENS, WINDOW, GROUP = 48, 6, QUERY_HEADS // HEADS


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def rotary(model):
    return Rotary.of(model.config)


@pytest.fixture
def ids():
    torch.manual_seed(5)
    return torch.randint(VOCAB, (TOKENS,))


def new_gate(seed: int = 0) -> WriteGate:
    torch.manual_seed(seed)
    return WriteGate(LAYERS, HEADS, HEAD_DIM, hidden=16)


@torch.no_grad()
def last_hidden(model, ids: torch.Tensor) -> torch.Tensor:
    return model.base_model(ids[None], use_cache=False).last_hidden_state[0]


# ---------------------------------------------------------------- attention
@pytest.mark.parametrize("block", [5, 1024])
def test_gated_attention_is_the_loop(monkeypatch, block):
    monkeypatch.setattr(train_write, "QUERY_BLOCK", block)
    torch.manual_seed(0)
    query = torch.randn(HEADS, GROUP, 17, HEAD_DIM)
    key, value = torch.randn(2, HEADS, 17, HEAD_DIM)
    gates = torch.rand(HEADS, 17)
    gates[:, ::3] = 0
    out = gated_attention(query, key, value, gates, window=4, scale=0.7)
    for h in range(HEADS):
        for g in range(GROUP):
            for i in range(17):
                expected = gated_row(query[h, g, i], key[h], value[h], gates[h], i, 4, 0.7)
                torch.testing.assert_close(out[h, g, i], expected, atol=1e-5, rtol=1e-4)


def test_open_gates_are_the_plain_model(model, ids):
    def everything(layer, keys):
        return torch.ones(keys.shape[:2])

    plain = last_hidden(model, ids)
    with write_gated(model, everything, WINDOW):
        gated = last_hidden(model, ids)
    assert model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(gated, plain, atol=1e-4, rtol=0)  # another kernel
    assert hidden_distance(model, ids, everything, WINDOW) < 1e-10


def test_open_gates_are_exactly_attention_without_gates(model, ids):
    """Bit for bit, against the same kernel with a causal mask that knows no gates."""

    def causal(module, query, key, value, attention_mask, scaling=None, **kwargs):
        mask = torch.zeros(TOKENS, TOKENS).masked_fill(torch.ones(TOKENS, TOKENS).triu(1) > 0, -torch.inf)
        shape = (HEADS, GROUP, TOKENS, TOKENS)
        query = query[0].unflatten(0, shape[:2])
        key, value = (x[0][:, None].expand(-1, GROUP, -1, -1) for x in (key, value))
        with sdpa_kernel(SDPBackend.MATH):
            out = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask.expand(shape), scale=scaling)
        return out.flatten(0, 1).transpose(0, 1)[None], None

    with attention_replaced(model, "test_causal", causal):
        plain = last_hidden(model, ids)
    with write_gated(model, lambda layer, keys: torch.ones(keys.shape[:2]), WINDOW):
        assert torch.equal(last_hidden(model, ids), plain)


def test_threshold_gates_are_a_masked_model(model, rotary, ids):
    gate, tau = shaken(new_gate()), 0.5
    own, admitted = own_gates(gate, rotary), {}

    def masked(module, query, key, value, attention_mask, scaling=None, **kwargs):
        keep = own(module.layer_idx, key[0]) > tau
        admitted[module.layer_idx] = keep
        i, j = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)
        seen = (j <= i) & ((i - j < WINDOW) | keep[:, None])  # [H, T, T]
        logits = query[0].unflatten(0, (HEADS, GROUP)) @ key[0][:, None].transpose(-1, -2) * scaling
        attention = logits.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
        return (attention @ value[0][:, None]).flatten(0, 1).transpose(0, 1)[None], None

    with attention_replaced(model, "test_masked", masked):
        expected = last_hidden(model, ids)
    with write_gated(model, lambda layer, keys: (own(layer, keys) > tau).float(), WINDOW):
        got = last_hidden(model, ids)
    assert 0.2 < torch.stack(list(admitted.values())).float().mean() < 0.8
    assert (expected - last_hidden(model, ids)).abs().max() > 0.1
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    settings = WriteTraining(window=WINDOW, tau=tau)
    results = evaluate(model, gate, [ids, ids], settings)
    assert results["distance"] == pytest.approx((expected - last_hidden(model, ids)).square().mean().item(), rel=1e-3)
    assert results["admitted"] == pytest.approx(torch.stack(list(admitted.values())).float().mean().item())


def test_own_gates_see_the_projected_keys(model, rotary, ids):
    """Un-rotating gives back what the key projection made."""
    projected = {}
    hooks = [
        layer.self_attn.k_proj.register_forward_hook(lambda m, i, out, n=n: projected.update({n: out[0]}))
        for n, layer in enumerate(model.base_model.layers)
    ]
    gate, compared = shaken(new_gate()), []
    own = own_gates(gate, rotary)

    def compare(layer, keys):
        k_pre = projected[layer].unflatten(-1, (HEADS, HEAD_DIM)).transpose(0, 1)
        torch.testing.assert_close(own(layer, keys), gate.score(layer, k_pre, keys), atol=1e-5, rtol=0)
        compared.append(layer)
        return torch.ones(keys.shape[:2])

    with write_gated(model, compare, WINDOW):
        last_hidden(model, ids)
    for hook in hooks:
        hook.remove()
    assert compared == list(range(LAYERS))


# ---------------------------------------------------------------- losses
def test_sparsity_loss_of_both_forms():
    gates = torch.rand(LAYERS, HEADS, 10)
    pressure = gates + gates * (1 - gates)
    torch.testing.assert_close(sparsity_loss(gates, 4, "paper"), pressure.mean())
    local = torch.tensor([min(4 / (10 - s), 1.0) for s in range(10)])
    torch.testing.assert_close(sparsity_loss(gates, 4, "remaining"), (local + (1 - local) * pressure).mean())


def test_no_pressure_on_tokens_whose_life_is_in_the_window():
    gates = torch.full((1, 1, 10), 0.5, requires_grad=True)
    sparsity_loss(gates, 4, "remaining").backward()
    assert (gates.grad[..., 6:] == 0).all() and (gates.grad[..., :6] > 0).all()
    assert (gates.grad[0, 0, :6].diff() < 0).all()  # the older, the more


def test_learning_rate_rises_for_a_tenth_and_falls_to_nothing():
    rates = [rate(50, 2.0, step) for step in range(51)]
    assert rates[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0]) and max(rates) == 2.0
    assert all(a > b for a, b in zip(rates[5:], rates[6:], strict=False))
    assert rates[50] == pytest.approx(0) and rates[49] > 0


def test_recomputing_layers_changes_no_gradient(model, rotary, ids):
    settings = WriteTraining(window=WINDOW)
    gates = [new_gate(), new_gate()]
    seen = [write_step(model, gates[0], rotary, ids, settings)]
    calls = []
    hook = model.base_model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(0))
    with layers_recomputed(model):
        seen.append(write_step(model, gates[1], rotary, ids, settings))
    hook.remove()
    assert len(calls) == 3  # teacher, student, and the student again
    assert seen[0] == seen[1]
    for a, b in zip(gates[0].parameters(), gates[1].parameters(), strict=True):
        assert a.grad.abs().max() > 0
        torch.testing.assert_close(a.grad, b.grad, atol=1e-7, rtol=1e-4)
    assert not model.training and not any(module.training for module in model.modules())


def test_a_bfloat16_backbone_gives_nearly_the_same_gradients(model, rotary, ids):
    """As on a GPU: backbone in bfloat16, gate in float32 under autocast."""
    settings, gates = WriteTraining(window=WINDOW), [new_gate(), new_gate()]
    rough = tiny_llama().bfloat16()
    with layers_recomputed(rough):
        seen = [write_step(m, gate, rotary, ids, settings) for m, gate in zip((model, rough), gates, strict=True)]
    assert seen[1]["loss"] == pytest.approx(seen[0]["loss"], rel=0.1) and seen[0] != seen[1]
    a, b = (torch.cat([weight.grad.flatten() for weight in gate.parameters()]) for gate in gates)
    assert b.dtype == torch.float32
    assert torch.cosine_similarity(a, b, dim=0) > 0.9


def test_gradients_are_the_slope_of_the_loss(model, rotary, ids):
    """By finite differences in float64, along the gradient of all weights together."""
    double = tiny_llama().double()
    settings = WriteTraining(window=WINDOW, sparsity_weight=0.5)
    gate = new_gate().double()
    write_step(double, gate, rotary, ids, settings)
    slope = torch.stack([weight.grad.square().sum() for weight in gate.parameters()]).sum()
    losses = []
    for sign in (1, -1):
        moved = new_gate().double()
        with torch.no_grad():
            for a, b in zip(moved.parameters(), gate.parameters(), strict=True):
                a += sign * 1e-3 / slope.sqrt() * b.grad
        losses.append(write_step(double, moved, rotary, ids, settings)["loss"])
    assert (losses[0] - losses[1]) / 2e-3 == pytest.approx(slope.sqrt().item(), rel=0.02)


# ---------------------------------------------------------------- runs
def train(model, folder, steps: int | None = 40, every: int = 100, **changes):
    torch.manual_seed(3)
    sequences = list(torch.randint(VOCAB, (4, TOKENS)))
    settings = WriteTraining(**({"window": WINDOW, "steps": steps, "learning_rate": 1e-2} | changes))
    gate = new_gate()
    history = train_write_gate(model, gate, sequences, settings, Checkpoint(folder / "gate", "same", every))
    return gate, history, evaluate(model, gate, sequences, settings)


def test_training_lowers_the_loss_and_lambda_the_share_admitted(model, tmp_path):
    shares = []
    for name, weight in (("low", 0.02), ("high", 5.0)):
        _, history, results = train(model, tmp_path / name, sparsity_weight=weight, learning_rate=3e-2)
        assert len(history["loss"]) == 40
        assert sum(history["loss"][-8:]) < 0.9 * sum(history["loss"][:8])
        shares.append(results["admitted"])
    assert shares[1] < shares[0] - 0.3


def test_without_pressure_training_opens_the_gates(model, tmp_path):
    _, history, _ = train(model, tmp_path, sparsity_weight=0.0)
    assert sum(history["distance"][-8:]) < 0.7 * sum(history["distance"][:8])
    assert sum(history["sparsity"][-8:]) > sum(history["sparsity"][:8])


def test_one_pass_unless_steps_are_given(model, tmp_path):
    _, history, _ = train(model, tmp_path, steps=None)
    assert len(history["loss"]) == 4


def test_a_step_of_several_sequences_follows_their_mean(model, rotary, tmp_path):
    together, history, _ = train(model, tmp_path, steps=None, batch=4)  # all there are
    torch.manual_seed(3)
    sequences, gate = list(torch.randint(VOCAB, (4, TOKENS))), new_gate()
    seen = [write_step(model, gate, rotary, ids, WriteTraining(window=WINDOW)) for ids in sequences]
    optimizer = torch.optim.AdamW(gate.parameters(), lr=rate(1, 1e-2, 0), weight_decay=0.01)
    for weight in gate.parameters():
        weight.grad /= 4
    optimizer.step()
    assert history["loss"] == pytest.approx([sum(s["loss"] for s in seen) / 4])
    for a, b in zip(together.parameters(), gate.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-3)


class Stop(Exception):
    pass


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(model, tmp_path, monkeypatch):
    whole, history, _ = train(model, tmp_path / "whole", steps=9)
    step, done = train_write.write_step, []

    def stopping(*args):
        done.append(0)
        if len(done) > 7:
            raise Stop
        return step(*args)

    monkeypatch.setattr(train_write, "write_step", stopping)
    with pytest.raises(Stop):
        train(model, tmp_path / "cut", steps=9, every=5)
    done.clear()
    resumed, continued, _ = train(model, tmp_path / "cut", steps=9, every=5)
    assert len(done) == 4  # from the checkpoint at 5
    assert continued == history
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
