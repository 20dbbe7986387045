import json
from types import SimpleNamespace

import pytest

from vllm_kvplug.calibrate.released import load_released

CONFIG = SimpleNamespace(
    model_type="llama",
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=3,
    vocab_size=100,
    rope_theta=1e4,
)
NEW_COUNTS = {"anchor": 2, "volatile": 1, "pivot": 1, "satellite": 2}
OLD_COUNTS = {"Stable_Unique": 2, "Decaying_Unique": 1, "Similar_Leader": 1, "Similar_Member": 2}


def released(counts: dict) -> dict:
    return {
        "meta": {"type_map": {name: code for code, name in enumerate(counts, 1)}, "counts": counts},
        "classification_matrix": [[3, 4, 4], [1, 2, 1]],
        "allocation_matrix": [[-1.0, 0.5, 1.5], [0.75, -1.0, 1.25]],
        "leader_member_relations": [{"0": [1, 2]}, {}],
    }


@pytest.fixture
def write(tmp_path):
    def to_file(content: dict):
        path = tmp_path / "Head_Analysis_tiny.json"
        path.write_text(json.dumps(content))
        return path

    return to_file


@pytest.mark.parametrize("counts", [NEW_COUNTS, OLD_COUNTS])
def test_both_variants_of_role_names(write, counts):
    profile = load_released(write(released(counts)), CONFIG, name="tiny")
    assert profile.roles == (("pivot", "satellite", "satellite"), ("anchor", "volatile", "anchor"))
    assert profile.weights == ((-1.0, 0.5, 1.5), (0.75, -1.0, 1.25))
    assert profile.clusters == ({0: (1, 2)}, {})
    assert profile.stability is None
    assert (profile.model.name, profile.model.query_heads, profile.model.head_dim) == ("tiny", 6, 10)
    assert "Head_Analysis_tiny.json" in profile.provenance.source


def test_file_without_counts_is_read(write):
    content = released(NEW_COUNTS)
    del content["meta"]
    assert load_released(write(content), CONFIG).num_full == 2


@pytest.mark.parametrize(
    "change, message",
    [
        ({"classification_matrix": [[3, 4, 4]]}, "made for 1 layers of 3 heads"),
        ({"classification_matrix": [[3, 4, 4], [1, 7, 1]]}, r"unknown role codes \[7\]"),
        ({"meta": {"counts": NEW_COUNTS | {"pivot": 5}}}, "says 5 pivot heads, the matrix has 1"),
        ({"meta": {"counts": {"Leader": 1}}}, "neither 'anchor' nor 'Stable_Unique'"),
        ({"leader_member_relations": [{"1": [0, 2]}, {}]}, "pivots are"),
    ],
)
def test_contradictions_name_the_file(write, change, message):
    with pytest.raises(ValueError, match=message) as error:
        load_released(write(released(NEW_COUNTS) | change), CONFIG)
    assert "Head_Analysis_tiny.json" in str(error.value)


def test_other_json_is_refused(write):
    with pytest.raises(ValueError, match="is not a HeteroCache head analysis.*classification_matrix"):
        load_released(write({"hello": 1}), CONFIG)


def test_broken_json_is_refused(tmp_path):
    path = tmp_path / "cut.json"
    path.write_text('{"meta": ')
    with pytest.raises(ValueError, match="cut.json"):
        load_released(path, CONFIG)
