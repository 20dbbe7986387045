import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError
from transformers import LlamaConfig

from vllm_kvplug.calibrate import profile as profile_module
from vllm_kvplug.calibrate.profile import (
    HeadProfile,
    ProfileSettings,
    find_shipped,
    model_fingerprint,
    weights_hash,
)


def content(**changes) -> dict:
    """A valid profile of 2 layers and 3 KV heads, as JSON content."""
    base = {
        "model": {
            "name": "tiny",
            "fingerprint": "f",
            "layers": 2,
            "kv_heads": 3,
            "query_heads": 6,
            "head_dim": 8,
        },
        "roles": [["pivot", "satellite", "satellite"], ["anchor", "volatile", "anchor"]],
        "weights": [[-1, 0.5, 1.5], [0.75, -1, 1.25]],
        "clusters": [{"0": [1, 2]}, {}],
        "stability": [[0.4, 0.9, 0.3], [0.6, 0.2, 0.5]],
        "provenance": {"source": "test", "date": "2026-01-01"},
    }
    return base | changes


def test_counts():
    profile = HeadProfile.model_validate(content())
    assert (profile.num_heads, profile.num_full, profile.num_compressed) == (6, 2, 4)
    assert [profile.count(role) for role in ("anchor", "volatile", "pivot", "satellite")] == [2, 1, 1, 2]


def test_save_and_load(tmp_path):
    profile = HeadProfile.model_validate(content())
    profile.save(tmp_path / "deep" / "tiny.json")
    assert HeadProfile.load(tmp_path / "deep" / "tiny.json") == profile


def test_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        HeadProfile.model_validate(content()).version = 1


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"surprise": 1}, "surprise"),
        ({"version": 2}, "version"),
        ({"roles": [["pivot", "satellite", "satellite"]]}, "roles must be 2 layers of 3"),
        ({"stability": [[0.4, 0.9], [0.6, 0.2]]}, "stability must be 2 layers of 3"),
        ({"clusters": [{"0": [1, 2]}]}, "clusters must have 2"),
        ({"clusters": [{"0": [1]}, {}]}, "every satellite"),
        ({"clusters": [{"0": [1, 2, 2]}, {}]}, "every satellite"),
        ({"clusters": [{"1": [0, 2]}, {}]}, "pivots are"),
        ({"clusters": [{"0": [1, 2]}, {"1": []}]}, "pivots are"),
        ({"weights": [[1, 0.5, 1.5], [0.75, -1, 1.25]]}, "a pivot has weight -1"),
        ({"weights": [[-1, -1, 1.5], [0.75, -1, 1.25]]}, "a satellite needs a weight"),
        ({"weights": [[-1, 0.5, 1.5], [0.75, -1, 1.9]]}, "mean 1"),
        ({"weights": [[-1, float("nan"), 1.5], [0.75, -1, 1.25]]}, "finite"),
        ({"model": content()["model"] | {"query_heads": 7}}, "evenly"),
    ],
)
def test_bad_profiles_are_rejected(changes, message):
    with pytest.raises(ValidationError, match=message):
        HeadProfile.model_validate(content(**changes))


def test_pivot_without_satellites_is_rejected():
    roles = [["pivot", "satellite", "satellite"], ["anchor", "pivot", "anchor"]]
    with pytest.raises(ValidationError, match="without satellites"):
        HeadProfile.model_validate(content(roles=roles, clusters=[{"0": [1, 2]}, {"1": []}]))


@pytest.mark.parametrize("bad", [{"kernel": 4}, {"top_fraction": 0}, {"steps": 0}, {"tau_sim": 1.5}])
def test_bad_settings_are_rejected(bad):
    with pytest.raises(ValidationError):
        ProfileSettings(**bad)


SHAPE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


def test_fingerprint_is_the_same_in_every_config_layout():
    new = SHAPE | {"num_key_value_heads": 2, "head_dim": 16, "rope_parameters": {"rope_theta": 500000.0}}
    old = SHAPE | {"num_key_value_heads": 2, "rope_theta": 500000, "rope_scaling": None}
    both = new | {"rope_theta": 500000.0}
    layered = new | {"rope_parameters": {"full_attention": {"rope_theta": 500000.0}}}
    layouts = [SimpleNamespace(**fields) for fields in (new, old, both, layered)]
    layouts.append(LlamaConfig(**{k: v for k, v in new.items() if k != "model_type"}))
    assert len({model_fingerprint(layout) for layout in layouts}) == 1


@pytest.mark.parametrize("change", [{"rope_theta": 1e6}, {"num_key_value_heads": 1}, {"head_dim": 32}])
def test_fingerprint_tells_architectures_apart(change):
    base = SHAPE | {"num_key_value_heads": 4, "rope_theta": 1e4}
    assert model_fingerprint(SimpleNamespace(**base)) != model_fingerprint(SimpleNamespace(**base | change))


def test_fingerprint_without_grouped_heads_or_rope():
    assert model_fingerprint(SimpleNamespace(**SHAPE)) == model_fingerprint(
        SimpleNamespace(**SHAPE, num_key_value_heads=None, head_dim=None, rope_parameters=None)
    )


def test_weights_hash_follows_the_bytes(tmp_path):
    with pytest.raises(FileNotFoundError):
        weights_hash(tmp_path)
    (tmp_path / "b.safetensors").write_bytes(b"2")
    (tmp_path / "a.safetensors").write_bytes(b"1")
    first = weights_hash(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert weights_hash(tmp_path) == first
    (tmp_path / "b.safetensors").write_bytes(b"3")
    assert weights_hash(tmp_path) != first


def test_find_shipped(tmp_path, monkeypatch):
    HeadProfile.model_validate(content()).save(tmp_path / "tiny.json")
    (tmp_path / "other.json").write_text(json.dumps({"something": "else"}))
    (tmp_path / "gate.safetensors").write_bytes(b"\0")
    monkeypatch.setattr(profile_module, "shipped_files", lambda: iter(sorted(tmp_path.iterdir())))
    assert find_shipped("f") == tmp_path / "tiny.json"
    assert find_shipped("unknown") is None


@pytest.mark.parametrize("name", ["smollm2-kv", "smollm2-135m-instruct"])
def test_shipped_profiles_are_valid_and_found(name):
    path = Path(__file__).parents[2] / "profiles" / f"{name}.json"
    profile = HeadProfile.load(path)
    found = find_shipped(profile.model.fingerprint)
    assert found is not None and found.name == path.name
    # HeteroCache at its default ratio of 0.5 pays for the full heads first
    assert int(0.5 * profile.num_heads) > profile.num_full
    assert profile.provenance.settings is not None and profile.provenance.texts
