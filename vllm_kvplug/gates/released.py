"""Readers for the gates that the authors of WG-KV and Fast KVzip published, both written by torch.save.

Read with torch's unpickler that makes tensors and arrays only, so a file cannot run code.
"""

from __future__ import annotations

import datetime
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_kvplug.calibrate.profile import ProfiledModel
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.gates.files import GateMetadata, SinkGateShape, WriteGateShape, check_weights
from vllm_kvplug.gates.sink_gate import SinkGate
from vllm_kvplug.gates.write_gate import WriteGate

WRITE_KEY = re.compile(r"model\.layers\.(\d+)\.self_attn\.g_predictors\.(.+)")
LAMBDA = re.compile(r"-(\d+(?:\.\d+)?)$")


def import_write_gate(path: str | Path, hf_config: Any, name: str) -> tuple[WriteGate, GateMetadata]:
    """WG-KV's `{model}-{lambda}.pt`: a state dict of the model that holds the gates alone.

    A layer has pre_key_norm.weight [d], post_key_norm.weight [d] and two grouped convolutions of width 1:
    conv1.weight [H*m, 2d, 1], conv1.bias [H*m], conv2.weight [H, m, 1], conv2.bias [H].
    """
    path, model = Path(path), ProfiledModel.of(hf_config, name)
    layers: dict[int, dict[str, Tensor]] = {}
    for key, weight in _read(path).items():
        match = WRITE_KEY.fullmatch(str(key))
        if not match:
            raise PolicyError(f"{path} is not a WG-KV checkpoint: it holds {key}")
        layers.setdefault(int(match[1]), {})[match[2]] = weight.detach().float()
    stacked = _stack(path, [layers[layer] for layer in sorted(layers)], model.layers)
    heads = (model.layers, model.kv_heads)
    try:
        weights = {
            "norm_pre": stacked.pop("pre_key_norm.weight"),
            "norm_rope": stacked.pop("post_key_norm.weight"),
            "w1": stacked.pop("conv1.weight").reshape(*heads, -1, 2 * model.head_dim),
            "b1": stacked.pop("conv1.bias").reshape(*heads, -1),
            "w2": stacked.pop("conv2.weight").reshape(*heads, -1),
            "b2": stacked.pop("conv2.bias"),
        }
    except (KeyError, RuntimeError) as error:
        raise PolicyError(f"{path} is not a WG-KV checkpoint for {name}: {error}") from None
    if stacked:
        raise PolicyError(f"{path} is a WG-KV gate with other inputs than keys: it holds {sorted(stacked)}")
    found = LAMBDA.search(path.stem)
    shape = WriteGateShape(hidden=weights["b1"].shape[-1], sparsity_weight=float(found[1]) if found else None)
    metadata = _metadata(path, model, shape)
    gate = WriteGate(*heads, model.head_dim, shape.hidden)
    return _fill(gate, weights, path), metadata


def import_sink_gate(
    path: str | Path, hf_config: Any, name: str, double_bias: bool = False
) -> tuple[SinkGate, GateMetadata]:
    """Fast KVzip's `q{G}_dim16_sink16.pt`: {"module": a list of state dicts, one a layer, ...}.

    A layer has q_proj.weight [H*G*E, D], q_proj.bias, k_proj.weight [H*E, D], q_norm.weight and k_norm.weight [E],
    k_base [H, 1, S, E] and b [H, 1, G].

    double_bias: the released trainer adds b twice and the released inference once. True stores 2b, so that the gate
    scores as it did in training; False scores as the released inference does.
    """
    path, model = Path(path), ProfiledModel.of(hf_config, name)
    content = _read(path)
    if not isinstance(content.get("module"), list):
        raise PolicyError(f"{path} is not a Fast KVzip gate: it has no list 'module', one entry a layer")
    stacked = {key: weight.float() for key, weight in _stack(path, content["module"], model.layers).items()}
    group, heads = model.query_heads // model.kv_heads, (model.layers, model.kv_heads)
    try:
        dim = stacked["q_norm.weight"].shape[-1]
        queries = stacked["q_proj.weight"].reshape(*heads, group * dim, -1)
        keys = stacked["k_proj.weight"].reshape(*heads, dim, -1)
        weights = {
            "projection": torch.cat([queries, keys], dim=2),
            "q_bias": stacked["q_proj.bias"].reshape(*heads, group, dim),
            "norm_q": stacked["q_norm.weight"],
            "norm_k": stacked["k_norm.weight"],
            "sinks": stacked["k_base"].squeeze(2),
            "bias": stacked["b"].squeeze(2) * (2 if double_bias else 1),
        }
    except (KeyError, RuntimeError) as error:
        raise PolicyError(f"{path} is not a Fast KVzip gate for {name}: {error}") from None
    shape = SinkGateShape(hidden_size=hf_config.hidden_size, dim=dim, sinks=weights["sinks"].shape[-2])
    metadata = _metadata(path, model, shape, "b doubled" if double_bias else "b as published")
    gate = SinkGate(*heads, group, shape.hidden_size, dim, shape.sinks)
    return _fill(gate, weights, path), metadata


def _read(path: Path) -> Mapping[Any, Any]:
    # The curves beside Fast KVzip's weights are arrays, which torch does not allow by itself.
    arrays = [np.ndarray, np.dtype, type(np.dtype("float64")), type(np.dtype("float32"))]
    rebuild: Any = np.empty(0).__reduce__()[0]
    names = [(rebuild, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    allowed: list[Any] = [*arrays, *names]
    try:
        with torch.serialization.safe_globals(allowed):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise PolicyError(f"cannot read {path}: {error}") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise PolicyError(f"{path} is not a file of tensors: {str(error).splitlines()[0]}") from None
    if not isinstance(content, Mapping):
        raise PolicyError(f"{path} is not a published gate: it holds a {type(content).__name__}")
    return content


def _stack(path: Path, layers: list[dict[str, Tensor]], expected: int) -> dict[str, Tensor]:
    if len(layers) != expected:
        raise PolicyError(f"{path} has gates for {len(layers)} layers, the model has {expected}")
    if any(layer.keys() != layers[0].keys() for layer in layers):
        raise PolicyError(f"{path} holds other weights for some layers than for the first")
    return {key: torch.stack([layer[key] for layer in layers]) for key in layers[0]}


def _metadata(path: Path, model: ProfiledModel, shape: Any, note: str = "") -> GateMetadata:
    source = ", ".join(filter(None, [f"released file {path.name}", note]))
    return GateMetadata(model=model, gate=shape, source=source, date=datetime.date.today().isoformat())


def _fill(gate: Any, weights: dict[str, Tensor], path: Path) -> Any:
    check_weights(gate, weights, str(path))
    gate.load_state_dict(weights)
    return gate.requires_grad_(False)
