"""Reader for the head analysis files that the HeteroCache authors published.

Their JSON holds `classification_matrix` [L][H] of codes, `allocation_matrix` [L][H] of r_i (-1 for heads
that keep everything), `leader_member_relations` [L] of {pivot: [satellites]}, and `meta.counts`. An older
file names the roles `Stable_Unique`, `Decaying_Unique`, `Similar_Leader`, `Similar_Member`.
"""

import datetime
import json
from pathlib import Path
from typing import Any

from vllm_kvplug.calibrate.profile import (
    HeadProfile,
    ProfiledModel,
    Provenance,
    Role,
    kv_shape,
)

ROLE_OF_CODE: dict[int, Role] = {1: "anchor", 2: "volatile", 3: "pivot", 4: "satellite"}
OLD_NAMES: dict[Role, str] = {
    "anchor": "Stable_Unique",
    "volatile": "Decaying_Unique",
    "pivot": "Similar_Leader",
    "satellite": "Similar_Member",
}


def load_released(path: str | Path, hf_config: Any, name: str | None = None) -> HeadProfile:
    """Reads a published file; `hf_config` is the model's config, which the file does not describe.

    Raises ValueError, naming the file, if it is not such a file, contradicts itself or fits another model.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_text())
        return _convert(content, path.name, hf_config, name or path.stem)
    except KeyError as error:
        raise ValueError(f"{path} is not a HeteroCache head analysis: it has no {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _convert(content: dict, file_name: str, hf_config: Any, name: str) -> HeadProfile:
    layers, kv_heads, _, _ = kv_shape(hf_config)
    codes = content["classification_matrix"]
    if len(codes) != layers or any(len(row) != kv_heads for row in codes):
        shape = f"{len(codes)} layers of {len(codes[0]) if codes else 0} heads"
        raise ValueError(f"made for {shape}, but the model has {layers} layers of {kv_heads} KV heads")
    unknown = {code for row in codes for code in row} - ROLE_OF_CODE.keys()
    if unknown:
        raise ValueError(f"classification_matrix has unknown role codes {sorted(unknown)}")

    profile = HeadProfile(
        model=ProfiledModel.of(hf_config, name),
        roles=tuple(tuple(ROLE_OF_CODE[code] for code in row) for row in codes),
        weights=content["allocation_matrix"],
        clusters=content["leader_member_relations"],
        provenance=Provenance(source=f"released file {file_name}", date=datetime.date.today().isoformat()),
    )
    _check_counts(profile, content.get("meta", {}).get("counts"))
    return profile


def _check_counts(profile: HeadProfile, counts: dict[str, int] | None) -> None:
    """The counts repeat what the matrix says; a file where they disagree was edited or cut."""
    if counts is None:
        return
    for role, old_name in OLD_NAMES.items():
        stated = counts.get(role, counts.get(old_name))
        if stated is None:
            raise ValueError(f"meta.counts has neither {role!r} nor {old_name!r}, only {sorted(counts)}")
        if stated != profile.count(role):
            raise ValueError(f"meta.counts says {stated} {role} heads, the matrix has {profile.count(role)}")
