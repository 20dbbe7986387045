"""The reference takes an engine's K and V of 4 bits where they are as near as its own, and says where they are not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from cases import ANGLES
from engine_tools import ROUNDING, token_ids
from reference import Reference
from reference_yakv import Selecting, hosted, rounded, turned


def test_rows_that_err_more_are_strange() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(2, 40, 32, generator=generator) for _ in range(2)]
    theirs = [rounded(x * (1 + 1e-3), 4) for x in exact]
    taken, strange = hosted(exact, "higgs4", theirs)
    assert not strange and all(torch.equal(a, b) for a, b in zip(taken, theirs, strict=True))
    assert any(not torch.equal(a, rounded(x, 4)) for a, x in zip(taken, exact, strict=True))
    theirs[1][0, [3, 30]] = theirs[1][0, [30, 3]]
    taken, strange = hosted(exact, "higgs4", theirs)
    assert strange == [[1, 0, 3], [1, 0, 30]]
    assert torch.equal(taken[1][0, [3, 30]], rounded(exact[1], 4)[0, [3, 30]])
    assert hosted(exact, "auto", exact) == (exact, [])
    assert len(hosted(exact, "auto", [x + 1e-3 for x in exact])[1]) == 160


def test_values_in_the_middle_of_two_codes(tiny_model_dir: Path) -> None:
    """Another way of computing in float32, here weights that are a little off, gives one of them the other code."""
    prompt, rule = token_ids(257), Selecting(ANGLES)
    reference, other = Reference(tiny_model_dir), Reference(tiny_model_dir)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in other.model.parameters():
            if weight.dim() > 1:
                weight *= 1 + 2e-7 * torch.randn(weight.shape, generator=generator)
    theirs = other.replay(prompt, rule, 24)
    place, position = slice(0, 257 - rule.local), torch.arange(257 - rule.local)
    host = []
    for layer in theirs.layers:
        keys, values = layer.keys[:, :257].clone(), layer.values[:, :257]
        keys[:, place] = turned(keys[:, place], position, ANGLES, -1)
        host.append((keys, values))

    def error(**given: object) -> float:
        replay = reference.replay(prompt, replace(rule, engine=theirs.kept, **given), 24, force_tokens=theirs.tokens)
        assert replay.kept == theirs.kept and not replay.watcher.strange
        return float((replay.logits.log_softmax(-1) - theirs.logits.log_softmax(-1)).abs().max())

    assert error() > 100 * ROUNDING
    assert error(host=host) <= ROUNDING
