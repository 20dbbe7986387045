"""What admission refuses when an engine starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_kvplug.errors import PolicyError
from vllm_kvplug.memory import Geometry
from vllm_kvplug.policies.base import LocalWindow
from vllm_kvplug.shape import ModelShape
from vllm_kvplug.worker.admission import Admitter


def test_a_deferred_gate_reads_stored_keys_which_must_be_exact() -> None:
    nothing: Any = None
    shape, local = ModelShape(2, 2, 4, 16), LocalWindow(32, 0.5, deferred=True)
    exact, fp8 = (Geometry.of_rank(shape, 0, torch.bfloat16, 4, 64, pages) for pages in (None, torch.float8_e4m3fn))
    Admitter(exact, nothing, nothing, local, nothing, nothing)
    with pytest.raises(PolicyError, match="--kv-policy-config: defer.*--kv-cache-dtype"):
        Admitter(fp8, nothing, nothing, local, nothing, nothing)
