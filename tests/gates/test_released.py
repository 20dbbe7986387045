"""The authors' formats, in files written as their trainers write them."""

import os

import numpy as np
import pytest
import torch
from gates.gate_tools import HEAD_DIM, HEADS, HIDDEN, LAYERS, QUERY_HEADS, tiny_config
from torch import nn

from vllm_kvplug.errors import PolicyError
from vllm_kvplug.gates.released import import_sink_gate, import_write_gate

INNER, GROUP, DIM, SINKS, TOKENS = 12, QUERY_HEADS // HEADS, 16, 5, 9


def write_layer() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    first = nn.Conv1d(HEADS * 2 * HEAD_DIM, HEADS * INNER, 1, groups=HEADS)
    second = nn.Conv1d(HEADS * INNER, HEADS, 1, groups=HEADS)
    norms = [nn.RMSNorm(HEAD_DIM, eps=1e-6), nn.RMSNorm(HEAD_DIM, eps=1e-6)]
    for norm in norms:
        nn.init.normal_(norm.weight, 1, 0.3)
    return {"pre_key_norm": norms[0], "post_key_norm": norms[1], "conv1": first, "conv2": second}


@pytest.fixture
def write_file(tmp_path):
    parts = write_layer()
    state = {
        f"model.layers.{layer}.self_attn.g_predictors.{name}.{key}": value
        for layer in reversed(range(LAYERS))
        for name, part in parts.items()
        for key, value in part.named_parameters()
    }
    path = tmp_path / "tiny-instruct-0.16.pt"
    torch.save(state, path)
    return parts, path


def test_write_gate(write_file):
    parts, path = write_file
    gate, metadata = import_write_gate(path, tiny_config(), "tiny")
    k_pre, k_rope = torch.randn(2, HEADS, TOKENS, HEAD_DIM)
    keys = torch.cat([parts["pre_key_norm"](k_pre), parts["post_key_norm"](k_rope)], dim=-1)  # [H, T, 2d]
    channels = keys.transpose(1, 2).flatten(0, 1)[None]
    expected = parts["conv2"](nn.functional.gelu(parts["conv1"](channels)))[0].sigmoid()
    torch.testing.assert_close(gate.score(LAYERS - 1, k_pre, k_rope), expected, atol=1e-5, rtol=0)
    assert (metadata.gate.hidden, metadata.gate.sparsity_weight) == (INNER, 0.16)
    assert metadata.source == "released file tiny-instruct-0.16.pt" and metadata.weights_hash is None


def sink_layer() -> dict[str, torch.Tensor]:
    return {
        "q_proj.weight": torch.randn(HEADS * GROUP * DIM, HIDDEN),
        "q_proj.bias": torch.randn(HEADS * GROUP * DIM),
        "k_proj.weight": torch.randn(HEADS * DIM, HIDDEN),
        "q_norm.weight": 1 + 0.3 * torch.randn(DIM),
        "k_norm.weight": 1 + 0.3 * torch.randn(DIM),
        "k_base": torch.randn(HEADS, 1, SINKS, DIM),
        "b": torch.randn(HEADS, 1, GROUP),
    }


def sink_expected(layer: dict[str, torch.Tensor], hidden: torch.Tensor, times: int) -> torch.Tensor:
    """[H, T] as 1 / (1 + sum exp(u - z)), written with the file's own shapes."""

    def heads(x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x.view(len(hidden), HEADS, -1, DIM), (DIM,), norm, 1e-6)

    queries = heads(hidden @ layer["q_proj.weight"].T + layer["q_proj.bias"], layer["q_norm.weight"])
    keys = heads(hidden @ layer["k_proj.weight"].T, layer["k_norm.weight"])
    own = (queries * keys).sum(-1) / 4 + times * layer["b"][:, 0]
    sink = torch.einsum("thge,hse->thgs", queries, layer["k_base"][:, 0]) / 4
    return (1 / (1 + (sink - own[..., None]).exp().sum(-1))).mean(-1).T


@pytest.mark.parametrize("double", [False, True])
def test_sink_gate(tmp_path, double):
    layers = [sink_layer() for _ in range(LAYERS)]
    path = tmp_path / "q3_dim16_sink16.pt"
    curves = {"loss": np.random.rand(4, LAYERS), "acc": np.random.rand(4, LAYERS).astype("float32")}
    torch.save({"module": layers, **curves}, path)
    gate, metadata = import_sink_gate(path, tiny_config(), "tiny", double_bias=double)
    hidden = torch.randn(TOKENS, HIDDEN)
    for layer in range(LAYERS):
        expected = sink_expected(layers[layer], hidden, times=2 if double else 1)
        torch.testing.assert_close(gate.score(layer, hidden), expected, atol=1e-5, rtol=1e-5)
    assert (metadata.gate.dim, metadata.gate.sinks) == (DIM, SINKS)
    assert ("doubled" in metadata.source) is double


def test_gates_of_another_model_are_refused(write_file, tmp_path):
    _, path = write_file
    with pytest.raises(PolicyError, match="gates for 3 layers, the model has 4"):
        import_write_gate(path, tiny_config(num_hidden_layers=4), "tiny")
    with pytest.raises(PolicyError, match="has .* of shape|is not a WG-KV checkpoint for tiny"):
        import_write_gate(path, tiny_config(head_dim=16), "tiny")
    sink = tmp_path / "sink.pt"
    torch.save({"module": [sink_layer() for _ in range(LAYERS)]}, sink)
    with pytest.raises(PolicyError, match="projection of shape"):
        import_sink_gate(sink, tiny_config(hidden_size=36), "tiny")


def test_files_of_another_format_are_refused(write_file, tmp_path):
    _, path = write_file
    with pytest.raises(PolicyError, match="no list 'module'"):
        import_sink_gate(path, tiny_config(), "tiny")
    torch.save({"model.embed_tokens.weight": torch.zeros(1)}, path)
    with pytest.raises(PolicyError, match="is not a WG-KV checkpoint: it holds model.embed"):
        import_write_gate(path, tiny_config(), "tiny")
    path.write_text("no file of torch's")
    with pytest.raises(PolicyError, match="is not a file of tensors"):
        import_write_gate(path, tiny_config(), "tiny")
    with pytest.raises(PolicyError, match="cannot read"):
        import_write_gate(tmp_path / "missing.pt", tiny_config(), "tiny")


def test_a_gate_that_also_reads_values_is_refused(write_file):
    _, path = write_file
    state = torch.load(path)
    for layer in range(LAYERS):
        state[f"model.layers.{layer}.self_attn.g_predictors.value_norm.weight"] = torch.ones(HEAD_DIM)
    torch.save(state, path)
    with pytest.raises(PolicyError, match="other inputs than keys"):
        import_write_gate(path, tiny_config(), "tiny")


class Attack:
    def __reduce__(self):
        return os.mkdir, (os.environ["KVPLUG_TEST_ATTACK"],)


def test_a_file_cannot_run_code(tmp_path, monkeypatch):
    target = tmp_path / "made-by-the-file"
    monkeypatch.setenv("KVPLUG_TEST_ATTACK", str(target))
    torch.save({"module": Attack()}, tmp_path / "bad.pt")
    for read in (import_write_gate, import_sink_gate):
        with pytest.raises(PolicyError, match="is not a file of tensors"):
            read(tmp_path / "bad.pt", tiny_config(), "tiny")
    assert not target.exists()
    torch.load(tmp_path / "bad.pt", weights_only=False)  # the file is one that could have
    assert target.exists()
