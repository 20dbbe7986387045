"""Gates against loops."""

import pytest
import torch
from gates.gate_tools import HEAD_DIM, HEADS, HIDDEN, LAYERS, shaken
from gates.reference_gates import sink_score, write_score

from vllm_kvplug.gates.sink_gate import SinkGate
from vllm_kvplug.gates.write_gate import WriteGate

TOKENS, GROUP = 7, 3


@pytest.fixture
def write_gate() -> WriteGate:
    return shaken(WriteGate(LAYERS, HEADS, HEAD_DIM, hidden=12))


@pytest.fixture
def sink_gate() -> SinkGate:
    return shaken(SinkGate(LAYERS, HEADS, GROUP, HIDDEN, dim=4, sinks=5))


@pytest.mark.parametrize("layer", range(LAYERS))
def test_write_gate(write_gate, layer):
    k_pre, k_rope = 3 * torch.randn(HEADS, TOKENS, HEAD_DIM), 3 * torch.randn(HEADS, TOKENS, HEAD_DIM)
    expected = [
        [write_score(write_gate, layer, h, k_pre[h, t], k_rope[h, t]) for t in range(TOKENS)] for h in range(HEADS)
    ]
    scores = write_gate.score(layer, k_pre, k_rope)
    torch.testing.assert_close(scores, torch.tensor(expected), atol=1e-5, rtol=0)
    assert scores.std() > 0.05


def test_write_gate_of_some_heads_and_of_a_batch(write_gate):
    k_pre, k_rope = torch.randn(2, HEADS, TOKENS, HEAD_DIM), torch.randn(2, HEADS, TOKENS, HEAD_DIM)
    everything = write_gate.score(1, k_pre, k_rope)
    assert everything.shape == (2, HEADS, TOKENS)
    torch.testing.assert_close(write_gate.score(1, k_pre[0], k_rope[0]), everything[0])
    one = write_gate.score(1, k_pre[:, 1:2], k_rope[:, 1:2], slice(1, 2))
    torch.testing.assert_close(one, everything[:, 1:2])


def test_the_two_key_inputs_are_not_exchanged(write_gate):
    k_pre, k_rope = torch.randn(2, HEADS, TOKENS, HEAD_DIM)
    assert not torch.allclose(write_gate.score(0, k_pre, k_rope), write_gate.score(0, k_rope, k_pre), atol=1e-3)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_sink_gate(sink_gate, layer):
    hidden = 2 * torch.randn(TOKENS, HIDDEN)
    expected = [[sink_score(sink_gate, layer, h, hidden[t]) for t in range(TOKENS)] for h in range(HEADS)]
    scores = sink_gate.score(layer, hidden)
    torch.testing.assert_close(scores, torch.tensor(expected), atol=1e-5, rtol=0)
    assert scores.std() > 0.01


def test_sink_gate_of_some_heads_and_of_layers(sink_gate):
    hidden = torch.randn(LAYERS, TOKENS, HIDDEN)
    everything = sink_gate.score(slice(None), hidden)
    assert everything.shape == (LAYERS, HEADS, TOKENS)
    for layer in range(LAYERS):
        torch.testing.assert_close(sink_gate.score(layer, hidden[layer]), everything[layer])
        one = sink_gate.score(layer, hidden[layer], slice(1, 2))
        torch.testing.assert_close(one, everything[layer, 1:2])


def test_sink_gate_as_one_product_with_other_projections(sink_gate):
    """What an engine does that appends the gate's rows of its own heads to the layer's QKV projection."""
    hidden, heads = torch.randn(TOKENS, HIDDEN), slice(1, 2)
    rows = sink_gate.rows(2, heads)
    assert rows.shape == (1 * (GROUP + 1) * 4, HIDDEN)
    fused = hidden @ torch.cat([torch.randn(10, HIDDEN), rows]).T
    torch.testing.assert_close(
        sink_gate.score_projected(2, fused[:, 10:], heads), sink_gate.score(2, hidden)[heads], atol=1e-6, rtol=0
    )


def test_an_untrained_sink_gate_starts_low():
    """Sinks and bias are 0 at first, so 16 sinks leave a token about one part in 17."""
    scores = SinkGate(1, HEADS, GROUP, HIDDEN).score(0, torch.randn(500, HIDDEN))
    assert 0.04 < scores.mean() < 0.12


def test_a_part_of_the_layers_is_a_gate_and_can_be_put_back(sink_gate):
    hidden = torch.randn(TOKENS, HIDDEN)
    part = sink_gate.part(slice(1, 3))
    torch.testing.assert_close(part.score(0, hidden), sink_gate.score(1, hidden))
    shaken(part, seed=1)
    first, before = sink_gate.score(0, hidden), sink_gate.score(2, hidden)
    assert not torch.allclose(part.score(1, hidden), before, atol=1e-3)
    sink_gate.put(slice(1, 3), part)
    assert torch.equal(sink_gate.score(0, hidden), first)
    assert torch.equal(sink_gate.score(2, hidden), part.score(1, hidden))


def test_bfloat16_weights_and_inputs(write_gate, sink_gate):
    keys, hidden = torch.randn(HEADS, TOKENS, HEAD_DIM), torch.randn(TOKENS, HIDDEN)
    exact = write_gate.score(0, keys, keys), sink_gate.score(0, hidden)
    rough = (
        write_gate.bfloat16().score(0, keys.bfloat16(), keys.bfloat16()),
        sink_gate.bfloat16().score(0, hidden.bfloat16()),
    )
    for a, b in zip(exact, rough, strict=True):
        assert b.dtype == torch.float32
        torch.testing.assert_close(a, b, atol=0.03, rtol=0)
