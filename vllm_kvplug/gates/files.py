"""A gate as a file: safetensors whose metadata says, as JSON, for which model it was trained, how and on what.

Matrices are stored in bfloat16, or in int8 with a float32 scale per output row; everything else in float32.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal, overload

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vllm_kvplug.calibrate.profile import ProfiledModel, shipped_files
from vllm_kvplug.config import CONFIG_FLAG, explain
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.gates.sink_gate import SinkGate
from vllm_kvplug.gates.write_gate import WriteGate

Gate = WriteGate | SinkGate
Kind = Literal["wgkv", "fastkvzip"]
METADATA = "kvplug_gate"
SCALE = ".scale"


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class WriteGateShape(Frozen):
    """Size of a write gate, and the admission it was trained for."""

    kind: Literal["wgkv"] = "wgkv"
    hidden: int = Field(ge=1, description="hidden units a head")
    window: int = Field(default=256, ge=1, description="W, tokens that are always seen")
    tau: float = Field(default=0.1, ge=0, le=1, description="a token is admitted if its score exceeds this")
    sparsity_weight: float | None = Field(default=None, ge=0, description="lambda; None: not published")


class SinkGateShape(Frozen):
    """Size of a sink gate."""

    kind: Literal["fastkvzip"] = "fastkvzip"
    hidden_size: int = Field(ge=1, description="of the model")
    dim: int = Field(default=16, ge=1, description="D', of a gate's queries and keys")
    sinks: int = Field(default=16, ge=1, description="S, learned sink keys a head")


class TextFile(Frozen):
    name: str
    sha256: str


class GateMetadata(Frozen):
    """What a gate file says of itself. An imported gate knows less: what was not published is left out."""

    version: Literal[1] = 1
    model: ProfiledModel
    gate: Annotated[WriteGateShape | SinkGateShape, Field(discriminator="kind")]
    source: str
    date: str
    weights_hash: str | None = None
    training: dict[str, int | float | str] = Field(default_factory=dict, description="settings of the run")
    files: tuple[TextFile, ...] = Field(default=(), description="texts it was trained on")
    tokens: int | None = Field(default=None, description="tokens of them that batches are drawn from")
    results: dict[str, float | list[float]] = Field(default_factory=dict, description="on held-out tokens")
    versions: dict[str, str] = Field(default_factory=dict)

    @property
    def kind(self) -> Kind:
        return self.gate.kind

    def empty_gate(self) -> Gate:
        """An untrained gate of this size."""
        model, gate = self.model, self.gate
        if isinstance(gate, WriteGateShape):
            return WriteGate(model.layers, model.kv_heads, model.head_dim, gate.hidden)
        group = model.query_heads // model.kv_heads
        return SinkGate(model.layers, model.kv_heads, group, gate.hidden_size, gate.dim, gate.sinks)


# ---------------------------------------------------------------- writing
def save_gate(path: str | Path, gate: Gate, metadata: GateMetadata, int8: bool = False) -> None:
    """Write `gate`; int8 halves the file again, for scores that differ in the third digit."""
    tensors: dict[str, Tensor] = {}
    for name, weight in gate.state_dict().items():
        weight = weight.detach().cpu().float()
        if name not in gate.MATRICES:
            tensors[name] = weight
        elif int8:
            scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
            tensors[name], tensors[name + SCALE] = (weight / scale).round().to(torch.int8), scale
        else:
            tensors[name] = weight.bfloat16()
    write_safetensors(Path(path), tensors, {METADATA: metadata.model_dump_json()})


def write_safetensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write all of a file or nothing: a reader never finds half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".tmp")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, unfinished, metadata)
    umask = os.umask(0)
    os.umask(umask)
    unfinished.chmod(0o666 & ~umask)  # safetensors makes files that only their owner can read
    os.replace(unfinished, path)


# ---------------------------------------------------------------- reading
def read_metadata(kind: Kind, path: str | Path, fingerprint: str) -> GateMetadata:
    """What the file says of itself. Cheap, for processes that need no weights.

    Raises PolicyError if it is no gate file, holds another kind of gate, or one for another architecture.
    """
    where = f"{path}, the gate in {CONFIG_FLAG},"
    try:
        with safe_open(path, framework="numpy") as file:
            text = (file.metadata() or {}).get(METADATA)
        if text is None:
            raise ValueError("it has no gate metadata")
        metadata = GateMetadata.model_validate_json(text)
    except OSError as error:
        raise PolicyError(f"{kind}: cannot read {path}, the gate in {CONFIG_FLAG}: {error}") from None
    except (SafetensorError, ValueError) as error:
        reason = explain(error) if isinstance(error, ValidationError) else error
        raise PolicyError(f"{kind}: {where} is no gate file: {reason}") from None
    if metadata.kind != kind:
        raise PolicyError(f"{kind}: {where} is a gate for policy '{metadata.kind}'")
    if metadata.model.fingerprint != fingerprint:
        raise PolicyError(
            f"{kind}: {where} was trained for {metadata.model.name}, which has another architecture than this model; "
            f"train one with `kvplug train-gate {kind} MODEL --texts FILE`"
        )
    return metadata


@overload
def load_gate(kind: Literal["wgkv"], path: str | Path, model: ProfiledModel) -> tuple[WriteGate, GateMetadata]: ...
@overload
def load_gate(kind: Literal["fastkvzip"], path: str | Path, model: ProfiledModel) -> tuple[SinkGate, GateMetadata]: ...
def load_gate(kind: Kind, path: str | Path, model: ProfiledModel) -> tuple[Gate, GateMetadata]:
    """The gate in `path`, on the CPU in float32 and without gradients, and what the file says of it.

    Raises PolicyError, naming the policy's `gate` knob, unless all of it fits `model`, whatever that is called.
    """
    metadata = read_metadata(kind, path, model.fingerprint)
    where = f"{path}, the gate in {CONFIG_FLAG},"
    if metadata.model.model_copy(update={"name": model.name}) != model:
        raise PolicyError(f"{kind}: {where} contradicts itself: its fingerprint is this model's, its sizes are not")
    with torch.device("meta"):
        gate = metadata.empty_gate().requires_grad_(False)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, SafetensorError) as error:
        raise PolicyError(f"{kind}: {where} cannot be read: {error}") from None
    scales = {name: tensors.pop(name + SCALE, None) for name in gate.MATRICES}
    weights = {name: tensor.float() for name, tensor in tensors.items()}
    for name, scale in scales.items():
        if scale is not None and name in weights:
            weights[name] *= scale
    check_weights(gate, weights, f"{kind}: {where}")
    gate.load_state_dict(weights, assign=True)
    return gate, metadata


def check_weights(gate: Gate, weights: dict[str, Tensor], where: str) -> None:
    """Raises PolicyError if names, shapes or values are not those of such a gate."""
    expected = {name: list(weight.shape) for name, weight in gate.state_dict().items()}
    if weights.keys() != expected.keys():
        raise PolicyError(f"{where} should hold {sorted(expected)} and holds {sorted(weights)}")
    for name, weight in weights.items():
        if list(weight.shape) != expected[name]:
            raise PolicyError(f"{where} has {name} of shape {list(weight.shape)} where {expected[name]} is needed")
        if not weight.isfinite().all():
            raise PolicyError(f"{where} has values in {name} that are not finite")


def find_shipped_gate(kind: Kind, fingerprint: str) -> Path | None:
    """The gate of that kind that comes with the project for this architecture, or None."""
    for path in shipped_files():
        if path.suffix != ".safetensors":
            continue
        try:
            read_metadata(kind, path, fingerprint)
        except PolicyError:
            continue
        return path
    return None


def find_gate(kind: Kind, given: str | None, fingerprint: str, model: str) -> Path:
    """The gate file of a policy's `gate` knob, or else the shipped one; PolicyError if there is none."""
    found = Path(given) if given else find_shipped_gate(kind, fingerprint)
    if found is None:
        raise PolicyError(
            f"{kind} has no shipped gate for {model or 'this model'}: train one with `kvplug train-gate {kind} MODEL "
            f'--texts FILE` and pass {CONFIG_FLAG} \'{{"gate": "OUT.safetensors"}}\''
        )
    return found
