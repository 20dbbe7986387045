"""Which steps project hidden states for a gate, and which batches vLLM may run as captured decode steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode

from vllm_kvplug.compat import keep_from_decode_graphs
from vllm_kvplug.worker import hidden


@pytest.mark.parametrize(
    "asked, mode, taps",
    [
        (True, CUDAGraphMode.NONE, True),
        (True, CUDAGraphMode.FULL, True),
        (False, CUDAGraphMode.NONE, False),
        (False, CUDAGraphMode.FULL, False),
        (False, CUDAGraphMode.PIECEWISE, True),  # captured once for steps of either kind
        (False, None, False),
    ],
)
def test_tap(asked: bool, mode: Any, taps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SimpleNamespace(gate_asked=asked, projected=torch.full((5, 2), torch.nan))
    monkeypatch.setattr(hidden, "_TAPPED", {7: engine})
    monkeypatch.setattr(hidden, "is_forward_context_available", lambda: mode is not None)
    monkeypatch.setattr(hidden, "get_forward_context", lambda: SimpleNamespace(cudagraph_runtime_mode=mode))
    states, rows = torch.randn(3, 4), torch.randn(2, 4)
    torch.ops.vllm_kvplug.tap(states, torch.empty(3, 1), rows, 7)
    expected = torch.full((5, 2), torch.nan)
    if taps:
        expected[:3] = states @ rows.T
    torch.testing.assert_close(engine.projected, expected, equal_nan=True)


def test_batches_that_are_kept_from_decode_graphs() -> None:
    """Both model runners have the method that is replaced; its answer is changed only when it has to be."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1

    assert hasattr(V2, "gather_batch_req_state") and hasattr(V1, "_is_uniform_decode")
    assert not hasattr(V1, "gather_batch_req_state")
    kept = False
    new = SimpleNamespace(gather_batch_req_state=lambda output, dummy: (output, 1))
    old = SimpleNamespace(_is_uniform_decode=lambda **given: given["num_reqs"] == 3)
    for runner in (new, old):
        keep_from_decode_graphs(runner, lambda: kept)
    assert new.gather_batch_req_state("batch", False) == ("batch", 1) and old._is_uniform_decode(num_reqs=3)
    kept = True
    assert new.gather_batch_req_state("batch", False) == ("batch", None) and not old._is_uniform_decode(num_reqs=3)
