"""The oracle without an engine: files of scores, what is refused of them, and budgets that follow from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_tools import kept_tokens
from safetensors.torch import save_file

from vllm_kvplug.calibrate.profile import ProfiledModel
from vllm_kvplug.cuts import Cuts
from vllm_kvplug.door import check_request
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.options import OptionError, RequestOptions
from vllm_kvplug.policies.base import PromptView
from vllm_kvplug.policies.oracle import METADATA, Oracle, ScoresMetadata, load_scores, save_scores, scores_name
from vllm_kvplug.policies.registry import make_policy
from vllm_kvplug.shape import ModelShape

SHAPE = ModelShape(layers=3, kv_heads=2, query_heads=4, head_dim=32, fingerprint="tiny")
METADATA_OF_SHAPE = ScoresMetadata(kind="answer", model=ProfiledModel.of_shape(SHAPE))
PROMPT = list(range(100))
NAME = scores_name(PROMPT)
FLOAT32 = 4


@pytest.fixture
def scores(tmp_path: Path) -> torch.Tensor:
    """Saved for PROMPT in tmp_path."""
    made = torch.rand(3, 2, len(PROMPT), generator=torch.Generator().manual_seed(0))
    save_scores(tmp_path, PROMPT, made, METADATA_OF_SHAPE)
    return made


def oracle(folder: Path, options: RequestOptions | None = None, **knobs: Any) -> Oracle:
    policy = make_policy("oracle", {"scores": str(folder), **knobs}, SHAPE)
    assert isinstance(policy, Oracle)
    return policy.for_request(RequestOptions(scores=NAME) if options is None else options)


def selected(policy: Oracle, tokens: int) -> list[list[list[int]]]:
    """What heads keep by budgets and ranks, as the engine puts them together."""
    kept, result = policy.kept(tokens), []
    for layer, counts in enumerate(kept):
        nothing = torch.zeros(2, tokens, 32)
        ranks = policy.score(PromptView(nothing[:0], nothing, layer, range(2), 1.0, nothing))
        result.append(kept_tokens(ranks, counts))
    return result


# ---------------------------------------------------------------------------------------------- budgets


@pytest.mark.parametrize("ratio", [0.1, 0.29, 0.5, 0.97])
def test_the_best_of_all_heads_together(tmp_path: Path, scores: torch.Tensor, ratio: float):
    """By hand: everything in the window, and of the rest as many of the best as the budget has left."""
    policy = oracle(tmp_path, ratio=ratio, window=0.05)
    total = int(ratio * 100 * 6 + 1e-9)
    ranked = sorted((-float(scores[i, h, t]), t, i, h) for t in range(95) for i in range(3) for h in range(2))
    expected = [[list(range(95, 100)) for _ in range(2)] for _ in range(3)]
    for _, t, i, h in ranked[: total - 30]:
        expected[i][h].append(t)
    assert selected(policy, 100) == [[sorted(head) for head in layer] for layer in expected]
    assert policy.plan().kept_tokens(100) == total


@pytest.mark.parametrize("allocation", ["joint", "layer", "uniform"])
@pytest.mark.parametrize("protect", [(), ((0, 10), (90, 98))], ids=str)
def test_totals_are_those_of_a_shared_budget(tmp_path: Path, scores: torch.Tensor, allocation: str, protect: Any):
    options = RequestOptions(protect=protect, scores=NAME)
    policy = oracle(tmp_path, options, ratio=0.3, window=0.05, allocation=allocation)
    cuts = Cuts(100, 100, 5, Cuts.of_ratio(100, 100, 5, 0.3).share, protect=protect)
    kept = policy.kept(100)
    assert sum(map(sum, kept)) == cuts.kept(100, 6) + 5 * 6
    safe = {t for start, end in protect for t in range(start, end)} | set(range(95, 100))
    assert all(safe <= set(head) for layer in selected(policy, 100) for head in layer)
    sums = {"joint": [sum(map(sum, kept))], "layer": [sum(layer) for layer in kept], "uniform": sum(kept, [])}
    assert max(sums[allocation]) - min(sums[allocation]) <= 1


def test_ties_go_to_the_earlier_token_then_to_the_earlier_head(tmp_path: Path):
    save_scores(tmp_path, PROMPT, torch.zeros(3, 2, 100, dtype=torch.float16), METADATA_OF_SHAPE)
    kept = selected(oracle(tmp_path, ratio=0.03, window=0.01), 100)
    assert kept == [[[0, 1, 99]] * 2] * 3


def test_an_answer_that_is_computed_again_is_kept(tmp_path: Path, scores: torch.Tensor):
    """Beside the same share of what was scored; plans are also asked about shorter prompts."""
    policy = oracle(tmp_path, ratio=0.2, window=0.02)
    for tokens in (130, 101):
        assert all(set(range(100, tokens)) <= set(head) for layer in selected(policy, tokens) for head in layer)
    shares = [sum(t < 100 for layer in selected(policy, n) for head in layer for t in head) for n in (100, 130)]
    assert abs(shares[0] - shares[1]) < 40, shares
    for tokens in (1, 2, 50, 99):
        assert all(1 <= count <= tokens for layer in policy.kept(tokens) for count in layer)


def test_a_policy_reads_its_file_and_leaves_it_as_it_was(tmp_path: Path, scores: torch.Tensor):
    policy = oracle(tmp_path, RequestOptions(protect=((0, 50),), scores=NAME))
    policy.kept(100)
    assert torch.equal(load_scores(tmp_path, NAME, SHAPE), scores)
    assert oracle(tmp_path).kept(100) != policy.kept(100)


# ---------------------------------------------------------------------------------------------- refusals


def check(folder: Path, options: dict[str, Any], tokens: int = 100, **knobs: Any) -> None:
    check_request(oracle(folder, RequestOptions(), **knobs), options, tokens, tokens + 20, FLOAT32, blocks=1000)


def test_what_is_served(tmp_path: Path, scores: torch.Tensor):
    check(tmp_path, {"kvplug.scores": NAME})
    check(tmp_path, {"kvplug.scores": NAME, "kvplug.context_end": 100}, tokens=130)
    check(tmp_path, {"kvplug.off": 1})
    check(tmp_path, {"kvplug.budget": 1})
    check(tmp_path, {}, ratio=1)


REFUSED = {
    "none": ({}, "needs the name of the prompt's file of scores as kvplug.scores"),
    "another folder": ({"kvplug.scores": f"../{NAME}"}, "kvplug.scores must be up to 64 hexadecimal digits"),
    "no name": ({"kvplug.scores": 5}, "kvplug.scores must be up to 64 hexadecimal digits"),
    "no such file": ({"kvplug.scores": "00ff"}, "kvplug.scores: there is no .*00ff.safetensors"),
    "no such file, though all is kept": ({"kvplug.scores": "00ff", "kvplug.budget": 1}, "there is no .*00ff"),
    "a context": ({"kvplug.scores": NAME, "kvplug.context_end": 60}, "scores of 100 tokens, 60 are to be cut"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_refused(tmp_path: Path, scores: torch.Tensor, reason: str):
    options, words = REFUSED[reason]
    with pytest.raises(OptionError, match=words):
        check(tmp_path, options)


def test_scores_of_another_prompt_are_refused(tmp_path: Path, scores: torch.Tensor):
    with pytest.raises(OptionError, match="scores of 100 tokens, 101 are to be cut"):
        check(tmp_path, {"kvplug.scores": NAME}, tokens=101)


WRONG = {
    "shape": (torch.zeros(3, 1, 100), {}, r"scores of shape \[3, 1, 100\] where \[3, 2, tokens\] is needed"),
    "dimensions": (torch.zeros(3, 2), {}, r"scores of shape \[3, 2\]"),
    "dtype": (torch.zeros(3, 2, 100, dtype=torch.int32), {}, "must hold finite float16 or float32 numbers"),
    "NaN": (torch.full((3, 2, 100), torch.nan), {}, "must hold finite float16 or float32 numbers"),
    "model": (torch.zeros(3, 2, 100), {"fingerprint": "another", "name": "big"}, "made for big, which has another"),
}


@pytest.mark.parametrize("reason", WRONG)
def test_wrong_files(tmp_path: Path, reason: str):
    tensor, model, words = WRONG[reason]
    described = METADATA_OF_SHAPE.model_copy(update={"model": METADATA_OF_SHAPE.model.model_copy(update=model)})
    save_scores(tmp_path, PROMPT, tensor, described)
    with pytest.raises(OptionError, match=words):
        check(tmp_path, {"kvplug.scores": NAME})


def test_files_of_another_kind(tmp_path: Path):
    """Of bytes, of other tensors, without a word on whose they are."""
    path = tmp_path / f"{NAME}.safetensors"
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(OptionError, match="is no file of scores"):
        check(tmp_path, {"kvplug.scores": NAME})
    save_file({"scores": torch.zeros(3, 2, 100)}, path)
    with pytest.raises(OptionError, match="is no file of scores"):
        check(tmp_path, {"kvplug.scores": NAME})
    save_file({"weights": torch.zeros(3, 2, 100)}, path, {METADATA: METADATA_OF_SHAPE.model_dump_json()})
    with pytest.raises(OptionError, match="is no file of scores"):
        check(tmp_path, {"kvplug.scores": NAME})
    save_file({"scores": torch.zeros(3, 2, 100)}, path, {METADATA: json.dumps({"version": 2})})
    with pytest.raises(OptionError, match="is no file of scores: version"):
        check(tmp_path, {"kvplug.scores": NAME})


def test_other_policies_take_no_scores():
    for name in ("snapkv", "knorm"):
        with pytest.raises(OptionError, match=f"policy '{name}' takes no scores of others: remove kvplug.scores"):
            check_request(make_policy(name, {}, SHAPE), {"kvplug.scores": NAME}, 100, 200, FLOAT32)
    with pytest.raises(OptionError, match="remove kvplug.scores"):
        check_request(make_policy("streaming", {}, SHAPE), {"kvplug.scores": NAME}, 100, 200, FLOAT32)


@pytest.mark.parametrize("folder", [None, "nowhere"])
def test_the_folder_is_needed(folder: str | None):
    with pytest.raises(PolicyError, match="of scores in --kv-policy-config"):
        make_policy("oracle", {} if folder is None else {"scores": folder}, SHAPE)
