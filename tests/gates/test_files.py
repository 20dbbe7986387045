import json
import os

import pytest
import torch
from gates.gate_tools import HEADS, HIDDEN, LAYERS, shaken, tiny_config
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from vllm_kvplug.calibrate.profile import HeadProfile, ProfiledModel, model_fingerprint
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.gates import files
from vllm_kvplug.gates.files import (
    GateMetadata,
    SinkGateShape,
    TextFile,
    WriteGateShape,
    find_shipped_gate,
    load_gate,
    read_metadata,
    save_gate,
)

SHAPES = {"wgkv": WriteGateShape(hidden=12, sparsity_weight=0.16), "fastkvzip": SinkGateShape(hidden_size=HIDDEN)}


def metadata_of(kind: str) -> GateMetadata:
    return GateMetadata(
        model=ProfiledModel.of(tiny_config(), "tiny"),
        gate=SHAPES[kind],
        source="test",
        date="2026-01-01",
        weights_hash="f" * 64,
        training={"steps": 3, "sparsity": "paper", "learning_rate": 0.5},
        files=(TextFile(name="a.txt", sha256="0" * 64),),
        tokens=12,
        results={"recall30": 0.5, "recall30_of_layers": [0.4, 0.6]},
    )


@pytest.fixture(params=SHAPES)
def kind(request) -> str:
    return request.param


@pytest.fixture
def saved(kind, tmp_path):
    path = tmp_path / "new" / "gate.safetensors"
    gate = shaken(metadata_of(kind).empty_gate())
    save_gate(path, gate, metadata_of(kind))
    return gate, path


def scores(gate, kind: str) -> torch.Tensor:
    torch.manual_seed(1)
    if kind == "wgkv":
        return torch.stack([gate.score(layer, *torch.randn(2, HEADS, 500, 8)) for layer in range(LAYERS)])
    return torch.stack([gate.score(layer, torch.randn(500, HIDDEN)) for layer in range(LAYERS)])


def test_round_trip(saved, kind):
    gate, path = saved
    loaded, metadata = load_gate(kind, path, ProfiledModel.of(tiny_config(), "tiny"))
    assert metadata == metadata_of(kind)
    for name, weight in gate.state_dict().items():
        stored = loaded.state_dict()[name]
        assert stored.dtype == torch.float32
        assert torch.equal(stored, weight.bfloat16().float() if name in gate.MATRICES else weight)
    assert not any(weight.requires_grad for weight in loaded.parameters())
    assert [file.name for file in path.parent.iterdir()] == ["gate.safetensors"]  # nothing unfinished beside it


@pytest.mark.parametrize("int8, most, mean", [(False, 6e-3, 1e-3), (True, 2e-2, 3e-3)])
def test_what_storage_costs(saved, kind, tmp_path, int8, most, mean):
    gate, path = saved
    save_gate(path, gate, metadata_of(kind), int8)
    error = (scores(load_gate(kind, path, ProfiledModel.of(tiny_config(), "tiny"))[0], kind) - scores(gate, kind)).abs()
    assert 0 < error.max() < most and error.mean() < mean


def test_int8_halves_the_matrices(saved, kind):
    gate, path = saved
    stored = load_file(path)
    save_gate(path, gate, metadata_of(kind), int8=True)
    smaller = load_file(path)
    for name in gate.MATRICES:
        assert smaller[name].nbytes * 2 == stored[name].nbytes
        assert smaller[name + ".scale"].shape == (*stored[name].shape[:-1], 1)


def test_metadata_is_read_without_weights(saved, kind):
    _, path = saved
    assert read_metadata(kind, path, model_fingerprint(tiny_config())) == metadata_of(kind)
    with safe_open(path, framework="numpy") as file:
        assert json.loads(file.metadata()["kvplug_gate"])["model"]["name"] == "tiny"


def rewritten(path, change_tensors=None, **change_metadata) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = json.loads(file.metadata()["kvplug_gate"])
    tensors = load_file(path)
    if change_tensors:
        change_tensors(tensors)
    save_file(tensors, path, {"kvplug_gate": json.dumps(metadata | change_metadata)})


def refused(kind, path, message: str) -> None:
    with pytest.raises(PolicyError, match=message) as error:
        load_gate(kind, path, ProfiledModel.of(tiny_config(), "tiny"))
    assert "the gate in --kv-policy-config" in str(error.value) and str(error.value).startswith(f"{kind}: ")
    assert "gate.safetensors" in str(error.value) and "\n" not in str(error.value)


def test_a_missing_file(saved, kind):
    _, path = saved
    path.unlink()
    refused(kind, path, "cannot read")


def test_not_safetensors(saved, kind):
    _, path = saved
    path.write_bytes(b"PK\x03\x04 not safetensors at all")
    refused(kind, path, "is no gate file")


def test_a_file_that_was_cut(saved, kind):
    _, path = saved
    path.write_bytes(path.read_bytes()[:-7])
    refused(kind, path, "is no gate file")


def test_other_safetensors(saved, kind):
    _, path = saved
    save_file({"weight": torch.zeros(2)}, path)
    refused(kind, path, "it has no gate metadata")


def test_metadata_that_is_wrong(saved, kind):
    _, path = saved
    rewritten(path, tokens="many")
    refused(kind, path, "is no gate file: tokens: ")


def test_the_other_kind(saved, kind):
    _, path = saved
    other = "fastkvzip" if kind == "wgkv" else "wgkv"
    refused(other, path, f"is a gate for policy '{kind}'")


def test_another_model(saved, kind):
    _, path = saved
    with pytest.raises(PolicyError, match=f"was trained for tiny.*`kvplug train-gate {kind} MODEL"):
        load_gate(kind, path, ProfiledModel.of(tiny_config(num_hidden_layers=4), "tiny"))


def test_sizes_that_contradict_the_fingerprint(saved, kind):
    _, path = saved
    model = metadata_of(kind).model.model_dump() | {"layers": LAYERS + 1}
    rewritten(path, model=model)
    refused(kind, path, "contradicts itself")


def test_wrong_names_shapes_and_values(saved, kind):
    gate, path = saved
    name = gate.MATRICES[0]
    whole = path.read_bytes()
    rewritten(path, lambda tensors: tensors.pop(name))
    refused(kind, path, f"should hold .*{name}")
    path.write_bytes(whole)
    rewritten(path, lambda tensors: tensors.update({name: tensors[name][..., :-1].contiguous()}))
    refused(kind, path, f"has {name} of shape")
    path.write_bytes(whole)
    rewritten(path, lambda tensors: tensors[name].view(-1)[:1].fill_(torch.nan))
    refused(kind, path, f"values in {name} that are not finite")


def test_shipped_gates_are_found_by_kind_and_architecture(saved, kind, monkeypatch):
    _, path = saved
    (path.parent / "another.json").write_text("{}")
    save_file({"weight": torch.zeros(2)}, path.parent / "a.safetensors")
    monkeypatch.setattr(files, "shipped_files", lambda: iter(sorted(path.parent.iterdir())))
    fingerprint = model_fingerprint(tiny_config())
    assert find_shipped_gate(kind, fingerprint) == path
    assert find_shipped_gate("fastkvzip" if kind == "wgkv" else "wgkv", fingerprint) is None
    assert find_shipped_gate(kind, model_fingerprint(tiny_config(vocab_size=65))) is None


RESTORED = "cfd872c33e028b7f576bae6d8f8d2e714a6d23887d23be07881cc8ffc5f094c8"
"""Of SmolLM2-135M-Instruct's weights as they come back from 4 bits, on which its gates were trained (docs/gates.md)."""

SHIPPED = [path for path in files.shipped_files() if path.suffix == ".safetensors"]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_gates_fit_a_model_that_has_a_shipped_profile(path):
    kind = path.stem.rsplit("-", 1)[1]
    profile = HeadProfile.load(path.with_name(path.name.replace(f"-{kind}.safetensors", ".json")))
    found = find_shipped_gate(kind, profile.model.fingerprint)
    assert found == path
    _, metadata = load_gate(kind, path, profile.model)
    assert metadata.results and metadata.files
    assert metadata.weights_hash in (profile.provenance.weights_hash, RESTORED)


def test_others_can_read_what_the_umask_lets_them(kind, tmp_path):
    before = os.umask(0o027)
    try:
        save_gate(tmp_path / "gate.safetensors", metadata_of(kind).empty_gate(), metadata_of(kind))
    finally:
        os.umask(before)
    assert (tmp_path / "gate.safetensors").stat().st_mode & 0o777 == 0o640
