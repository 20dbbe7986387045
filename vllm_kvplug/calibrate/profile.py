"""Head profile: the per-head roles and budgets of one model that HeteroCache reads at start-up.

Notation: L layers, H KV heads. No torch here: the scheduler process and the command line read profiles too.
"""

import hashlib
import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vllm_kvplug.shape import ModelShape

Role = Literal["anchor", "volatile", "pivot", "satellite"]
ROLES: tuple[Role, ...] = ("anchor", "volatile", "pivot", "satellite")
FULL_ROLES = ("pivot", "volatile")
NO_WEIGHT = -1.0  # weight of a head that keeps its full cache


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ProfileSettings(_Frozen):
    """Knobs of a profiling run (HeteroCache, App. B.1). Thresholds are overlaps in [0, 1]."""

    length: int = Field(default=2048, ge=1, description="prompt tokens taken from each text")
    steps: int = Field(default=100, ge=1, description="greedy decode steps, fewer if the model ends its answer")
    top_fraction: float = Field(default=0.2, gt=0, le=1, description="size of the active set / prompt length")
    kernel: int = Field(default=5, ge=1, description="width of the average pool over positions, odd")
    tau_stable: float = Field(default=0.5, ge=0, le=1, description="an unclustered head this stable is an anchor")
    tau_sim: float = Field(default=0.5, ge=0, le=1, description="two heads this similar are neighbours")
    max_drift: float | None = Field(
        default=None, ge=0, le=1, description="roles by gain, heads that would gain this by following themselves whole"
    )

    @model_validator(mode="after")
    def _odd_kernel(self) -> "ProfileSettings":
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel must be odd to keep positions aligned, not {self.kernel}")
        return self


class ProfiledModel(_Frozen):
    name: str
    fingerprint: str
    layers: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    query_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)

    @classmethod
    def of(cls, hf_config: Any, name: str) -> "ProfiledModel":
        layers, kv_heads, query_heads, head_dim = kv_shape(hf_config)
        return cls(
            name=name,
            fingerprint=model_fingerprint(hf_config),
            layers=layers,
            kv_heads=kv_heads,
            query_heads=query_heads,
            head_dim=head_dim,
        )

    @classmethod
    def of_shape(cls, shape: ModelShape) -> "ProfiledModel":
        return cls(
            name=shape.name or "model",
            fingerprint=shape.fingerprint,
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            query_heads=shape.query_heads,
            head_dim=shape.head_dim,
        )


class ProfiledText(_Frozen):
    name: str
    sha256: str
    tokens: int = Field(ge=1, description="prompt tokens used")
    steps: int = Field(ge=1, description="decode steps run")


class Provenance(_Frozen):
    """Where the numbers come from. An imported profile knows less: what was not published is None."""

    source: str
    date: str
    weights_hash: str | None = None
    settings: ProfileSettings | None = None
    texts: tuple[ProfiledText, ...] = ()
    versions: dict[str, str] = Field(default_factory=dict)


class HeadProfile(_Frozen):
    """Roles, clusters and relative budgets of every KV head (HeteroCache, offline stage).

    roles      [L][H]  anchor and satellite heads are compressed, volatile and pivot heads keep everything
    weights    [L][H]  r_i of compressed heads, mean 1 over all layers together; -1 for the others
    clusters   [L]     {pivot: its satellites}
    stability  [L][H]  median overlap of a head's active set with the one of the prefill; None if unpublished
    """

    version: Literal[1] = 1
    model: ProfiledModel
    roles: tuple[tuple[Role, ...], ...]
    weights: tuple[tuple[float, ...], ...]
    clusters: tuple[dict[int, tuple[int, ...]], ...]
    stability: tuple[tuple[float, ...], ...] | None = None
    provenance: Provenance

    @model_validator(mode="after")
    def _consistent(self) -> "HeadProfile":
        self._check_shapes()
        for layer in range(self.model.layers):
            self._check_clusters(layer)
            self._check_weights(layer)
        compressed = [r for row in self.weights for r in row if r != NO_WEIGHT]
        if compressed and abs(sum(compressed) / len(compressed) - 1) > 1e-3:
            mean = sum(compressed) / len(compressed)
            raise ValueError(f"weights of anchors and satellites must have mean 1, not {mean:.4f}")
        return self

    def _check_shapes(self) -> None:
        layers, heads = self.model.layers, self.model.kv_heads
        if self.model.query_heads % heads:
            raise ValueError(f"{self.model.query_heads} query heads cannot share {heads} KV heads evenly")
        for name in ("roles", "weights", "stability"):
            matrix = getattr(self, name)
            if matrix is not None and [len(row) for row in matrix] != [heads] * layers:
                raise ValueError(f"{name} must be {layers} layers of {heads} KV heads")
        if len(self.clusters) != layers:
            raise ValueError(f"clusters must have {layers} entries, one a layer, not {len(self.clusters)}")

    def _check_clusters(self, layer: int) -> None:
        clusters, roles = self.clusters[layer], self.roles[layer]
        pivots = [head for head, role in enumerate(roles) if role == "pivot"]
        satellites = [head for head, role in enumerate(roles) if role == "satellite"]
        members = sorted(head for cluster in clusters.values() for head in cluster)
        if sorted(clusters) != pivots:
            raise ValueError(f"layer {layer}: clusters are led by {sorted(clusters)}, pivots are {pivots}")
        if members != satellites:
            raise ValueError(
                f"layer {layer}: every satellite must be in exactly one cluster; "
                f"clusters hold {members}, satellites are {satellites}"
            )
        if not all(clusters.values()):
            raise ValueError(f"layer {layer}: a pivot without satellites is a volatile head or an anchor")

    def _check_weights(self, layer: int) -> None:
        for head, (role, weight) in enumerate(zip(self.roles[layer], self.weights[layer], strict=True)):
            if role in FULL_ROLES and weight != NO_WEIGHT:
                raise ValueError(f"layer {layer} head {head}: a {role} has weight -1, not {weight}")
            if role not in FULL_ROLES and weight < 0:
                raise ValueError(f"layer {layer} head {head}: a {role} needs a weight >= 0, not {weight}")

    @property
    def num_heads(self) -> int:
        return self.model.layers * self.model.kv_heads

    @property
    def num_full(self) -> int:
        """Heads that keep every token: pivots and volatile heads."""
        return sum(role in FULL_ROLES for row in self.roles for role in row)

    @property
    def num_compressed(self) -> int:
        return self.num_heads - self.num_full

    @property
    def smallest_rho(self) -> float:
        """HeteroCache needs int(rho*N) > N_full: full heads are paid first, the rest is shared. 3 decimals."""
        return -(-1000 * (self.num_full + 1) // self.num_heads) / 1000

    def count(self, role: Role) -> int:
        return sum(row.count(role) for row in self.roles)

    @classmethod
    def load(cls, path: str | Path) -> "HeadProfile":
        return cls.model_validate_json(Path(path).read_text())

    def save(self, path: str | Path) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_render(self.model_dump(mode="json")) + "\n")


def _render(value: Any, indent: str = "") -> str:
    """JSON with one line for whatever fits in it, so that a matrix shows one layer a line."""
    line = json.dumps(value)
    if not isinstance(value, dict | list) or len(line) + len(indent) <= 110:
        return line
    inner = indent + "  "
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {_render(item, inner)}" for key, item in value.items()]
    else:
        items = [_render(item, inner) for item in value]
    body = ",\n".join(inner + item for item in items)
    return f"{line[0]}\n{body}\n{indent}{line[-1]}"


def _rope_theta(hf_config: Any) -> float | None:
    """transformers 5 keeps it in rope_parameters (per layer type in hybrids), 4 in rope_theta."""
    parameters = getattr(hf_config, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention", parameters)
    theta = parameters.get("rope_theta", getattr(hf_config, "rope_theta", None))
    return None if theta is None else float(theta)


def kv_shape(hf_config: Any) -> tuple[int, int, int, int]:
    """(layers, KV heads, query heads, head dim); the last three may be implicit in older configs."""
    query_heads = hf_config.num_attention_heads
    kv_heads = getattr(hf_config, "num_key_value_heads", None) or query_heads
    head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // query_heads
    return hf_config.num_hidden_layers, kv_heads, query_heads, head_dim


def model_fingerprint(hf_config: Any) -> str:
    """sha256 of the architecture. Fine-tunes share it: roles are a property the base hands down."""
    layers, kv_heads, query_heads, head_dim = kv_shape(hf_config)
    fields = {
        "model_type": hf_config.model_type,
        "hidden_size": hf_config.hidden_size,
        "intermediate_size": hf_config.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": query_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": hf_config.vocab_size,
        "rope_theta": _rope_theta(hf_config),
    }
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def weights_hash(model_dir: str | Path) -> str:
    """sha256 over the safetensors files of a model folder, in the order of their names."""
    files = sorted(Path(model_dir).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no .safetensors files in {model_dir}")
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def shipped_files() -> Iterator[Path]:
    """Profiles and gates that come with the project."""
    try:
        folder = resources.files("vllm_kvplug.profiles")
    except ModuleNotFoundError:  # a source checkout keeps them beside the package
        folder = Path(__file__).parents[2] / "profiles"
    if folder.is_dir():
        yield from sorted(entry for entry in folder.iterdir() if isinstance(entry, Path))


def find_shipped(fingerprint: str) -> Path | None:
    """The shipped profile made for this architecture, or None."""
    for path in shipped_files():
        if path.suffix != ".json":
            continue
        content = json.loads(path.read_text())
        if content.get("model", {}).get("fingerprint") == fingerprint:
            return path
    return None
