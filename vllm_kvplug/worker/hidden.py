"""Hidden states for gates that want them: a tap in front of every attention block.

vLLM lets a plugin replace its QKVParallelLinear. Ours also multiplies the hidden states with the gate's matrix of the
layer, inside an op that declares to change the projection's result: so whatever compiles or captures the model keeps
it between the projection and the attention, which reads the product from a buffer. The op needs no layer, only the
matrix, so that vLLM's compiler still sees equal layers as equal. In steps that need no scores it does nothing, and
nothing is what full graphs of decode steps capture of it, for policies that never look at scores of answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from vllm.config import CUDAGraphMode, get_current_vllm_config_or_none
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.linear import QKVParallelLinear

from vllm_kvplug import compat

if TYPE_CHECKING:
    from vllm_kvplug.worker.runtime import Runtime

NAME = "QKVParallelLinear"
_TAPPED: WeakValueDictionary[int, Runtime] = WeakValueDictionary()
"""Engines with a tap, by the number that their op calls carry."""

_LIBRARY = torch.library.Library("vllm_kvplug", "FRAGMENT")
_LIBRARY.define("tap(Tensor hidden, Tensor(a!) qkv, Tensor rows, int engine) -> ()")


@torch.library.impl(_LIBRARY, "tap", "CompositeExplicitAutograd")
def _tap(hidden: torch.Tensor, qkv: torch.Tensor, rows: torch.Tensor, engine: int) -> None:
    runtime = _TAPPED[engine]
    if not runtime.gate_asked and not _in_piecewise_graph():
        return
    projected = runtime.projected
    if projected is not None and len(hidden) <= len(projected):  # vLLM's profiling may run more than a step ever has
        torch.mm(hidden, rows.T, out=projected[: len(hidden)])


@torch.library.register_fake("vllm_kvplug::tap", lib=_LIBRARY)
def _(hidden: torch.Tensor, qkv: torch.Tensor, rows: torch.Tensor, engine: int) -> None:
    pass


def _in_piecewise_graph() -> bool:
    """Whether what runs now is captured for steps with any rows, of which this one's may be all that need no scores."""
    return is_forward_context_available() and (get_forward_context().cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE)


class TappedQKV(QKVParallelLinear):
    """vLLM's layer, and the same where no gate of this engine wants hidden states."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config_or_none()
        runtime = compat.runtime_or_none(config) if config is not None else None
        self.engine = -1
        if runtime is None or runtime.gate is None or runtime.projected is None:
            return
        layer = compat.layer_index(self.prefix)
        rows = runtime.gate.rows(layer)
        assert rows is not None
        if rows.shape[1] != self.hidden_size:
            raise RuntimeError(f"{self.prefix}: hidden states have size {self.hidden_size}, the gate's {rows.shape[1]}")
        self.engine = runtime.number
        _TAPPED[self.engine] = runtime
        runtime.tapped.add(layer)
        self.register_buffer("gate_rows", rows, persistent=False)

    def forward(self, input_: torch.Tensor) -> Any:
        result = super().forward(input_)
        if self.engine >= 0:
            qkv = result[0] if isinstance(result, tuple) else result
            torch.ops.vllm_kvplug.tap(input_, qkv, self.gate_rows, self.engine)
        return result


def install_tap() -> None:
    """Put the tapped layer in vLLM's registry of replacements, once per process."""
    if op_registry_oot.get(NAME) is not TappedQKV:
        PluggableLayer.register_oot(name=NAME)(TappedQKV)
