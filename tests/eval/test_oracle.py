"""Scores of oracles against plain attention weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from vllm_kvplug.eval.oracle import CHUNK, answer_scores, kvzip_scores
from vllm_kvplug.gates import targets
from vllm_kvplug.gates.targets import Frame, reconstruction_targets
from vllm_kvplug.tiny import VOCAB

FRAME = Frame(torch.tensor([1, 2, 3]), torch.tensor([4, 5]), torch.tensor([6, 7, 8]), torch.tensor([9, 10]))


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path):
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()


def tokens(count: int) -> torch.Tensor:
    return torch.randint(20, VOCAB, (count,), generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("cut, answer, block", [(30, 8, 256), (30, 0, 256), (25, 40, 16), (2, 3, 256)])
def test_answer_scores_are_the_largest_weights(model, monkeypatch, cut: int, answer: int, block: int):
    """Of all weights at once, which transformers gives when asked; a group of two query heads a KV head."""
    monkeypatch.setattr(targets, "QUERY_BLOCK", block)
    given = tokens(cut + answer)
    found = answer_scores(model, given, cut)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = torch.cat(model(given[None], output_attentions=True).attentions)  # [L, query heads, n, n]
    model.set_attn_implementation("sdpa")
    expected = weights[:, :, cut - 1 :, : cut - 1].amax(2).unflatten(1, (2, 2)).amax(2)
    assert found.shape == (3, 2, cut) and found.dtype == torch.float32
    torch.testing.assert_close(found[..., :-1], expected, atol=1e-5, rtol=0)
    assert (found[..., -1] == 1).all()


def test_kvzip_scores_are_those_of_a_message(model):
    """What the chat template puts around it has the largest score."""
    message = tokens(40)
    prompt = torch.cat([FRAME.before, message, FRAME.answer])
    found = kvzip_scores(model, FRAME, prompt)
    assert torch.equal(found[..., 3:-2], reconstruction_targets(model, FRAME, message, CHUNK))
    assert (found[..., :3] == 1).all() and (found[..., -2:] == 1).all() and found.shape == (3, 2, 45)


def test_kvzip_scores_of_a_context_and_of_another_frame(model):
    """A context has no end of the message yet; a prompt that begins otherwise is repeated whole."""
    message = tokens(40)
    found = kvzip_scores(model, FRAME, torch.cat([FRAME.before, message]))
    assert torch.equal(found[..., 3:], reconstruction_targets(model, FRAME, message, CHUNK))
    bare = Frame(FRAME.before[:0], FRAME.first, FRAME.later, FRAME.answer)
    assert torch.equal(kvzip_scores(model, FRAME, message), reconstruction_targets(model, bare, message, CHUNK))
