"""`kvplug profile`: measure a model's KV heads and write its head profile."""

import argparse
import datetime
import json
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_kvplug.calibrate.profile import (
    NO_WEIGHT,
    ROLES,
    HeadProfile,
    ProfiledModel,
    ProfileSettings,
    Provenance,
    weights_hash,
)
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.spread import Spread, add_argument, spread


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = ProfileSettings()
    parser.add_argument("model", metavar="MODEL", help="model folder or Hugging Face id")
    parser.add_argument(
        "--texts",
        metavar="FILE",
        type=Path,
        nargs="+",
        required=True,
        help="plain text files, or .jsonl with a 'text' field a line; used as they are, so apply the chat "
        "template first if the model will see one",
    )
    parser.add_argument(
        "--length", type=int, default=default.length, help="prompt tokens per text (default %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=default.steps, help="decode steps per text (default %(default)s)")
    parser.add_argument(
        "--top-fraction", type=float, default=default.top_fraction, help="active / all (default %(default)s)"
    )
    parser.add_argument(
        "--kernel", type=int, default=default.kernel, help="average pool over positions (default %(default)s)"
    )
    parser.add_argument(
        "--tau-stable", type=float, default=default.tau_stable, help="anchor or volatile (default %(default)s)"
    )
    parser.add_argument(
        "--tau-sim", type=float, default=default.tau_sim, help="similar enough for a cluster (default %(default)s)"
    )
    parser.add_argument(
        "--max-drift",
        type=float,
        metavar="SHARE",
        help="instead of both tau: keep heads whole whose attention their own recent tokens catch better than those of "
        "the prompt's end, by this share of it; the others follow what they gain by following",
    )
    parser.add_argument("--out", type=Path, help="profile to write (default profiles/<model>.json)")
    parser.add_argument("--png", type=Path, help="also draw the profile")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    add_argument(parser)


def run(args: argparse.Namespace) -> int:
    try:
        settings = ProfileSettings(**{name: getattr(args, name) for name in ProfileSettings.model_fields})
        texts = read_texts(args.texts)
    except (OSError, ValueError) as error:
        raise PolicyError(f"profile: {error}") from error
    if args.png and find_spec("matplotlib") is None:  # say so before the minutes of measuring
        raise PolicyError("profile: --png needs matplotlib: pip install matplotlib")
    name = Path(args.model).name
    out = args.out or Path("profiles") / f"{name}.json"
    profile = profile_model(args.model, texts, settings, name, args.dtype, spread(args.ray))
    profile.save(out)
    if args.png:
        from vllm_kvplug.calibrate.plot import save_plot

        save_plot(profile, args.png)
    console = Console()
    console.print(summary(profile))
    console.print(f"written to {out}", highlight=False)
    return 0


def profile_model(
    model: str, texts: list[tuple[str, str]], settings: ProfileSettings, name: str, dtype: str, workers: Spread
) -> HeadProfile:
    """The whole run: score every head, apply the thresholds. `texts` are (name, text) pairs, one or more."""
    # torch and transformers take seconds to import, and `kvplug --help` needs neither
    from transformers import AutoConfig

    from vllm_kvplug.calibrate.profiler import assign, average, budget_weights

    if not texts:
        raise PolicyError("profile: needs at least one text")
    folder = local_folder(model)
    jobs = [(folder, workers.device, dtype, part, settings) for part in workers.parts(texts)]
    scores = average([text for part in workers.map(_score_part, jobs) for text in part])
    roles, clusters = assign(scores, settings)
    return HeadProfile(
        model=ProfiledModel.of(AutoConfig.from_pretrained(folder), name),
        roles=tuple(roles),
        weights=_rounded(budget_weights(roles, scores.stability)),
        clusters=tuple(clusters),
        stability=_rounded(scores.stability.tolist()),
        provenance=Provenance(
            source="kvplug profile",
            date=datetime.date.today().isoformat(),
            weights_hash=weights_hash(folder),
            settings=settings,
            texts=scores.texts,
            versions=versions(dtype),
        ),
    )


def _score_part(folder: Path, device: str, dtype: str, texts: list[tuple[str, str]], settings: ProfileSettings) -> Any:
    """Load the model and score these texts, in whatever process this is."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from vllm_kvplug.calibrate.profiler import score_texts

    network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    network.to(device).eval()
    return score_texts(network, AutoTokenizer.from_pretrained(folder), texts, settings)


def read_texts(files: list[Path]) -> list[tuple[str, str]]:
    """(name, text) pairs; a .jsonl file gives one per line, named file:line."""
    texts = []
    for file in files:
        if file.suffix != ".jsonl":
            texts.append((file.name, file.read_text()))
            continue
        for number, line in enumerate(file.read_text().splitlines(), 1):
            try:
                texts.append((f"{file.name}:{number}", json.loads(line)["text"]))
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(f"{file}:{number} is not a JSON object with a 'text' field") from error
    return texts


def summary(profile: HeadProfile) -> Table:
    table = Table(title=f"head profile of {profile.model.name}", show_header=False)
    for role in ROLES:
        table.add_row(role, str(profile.count(role)))
    table.add_row("full", f"{profile.num_full} of {profile.num_heads} heads")
    budgets = [r for row in profile.weights for r in row if r != NO_WEIGHT]
    if budgets:
        table.add_row("budget r", f"{min(budgets):.2f} to {max(budgets):.2f}, mean 1")
        table.add_row("smallest rho", str(profile.smallest_rho))
    else:
        table.add_row("budget r", "no head can be compressed: lower --tau-sim or --tau-stable")
    return table


def local_folder(model: str) -> Path:
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.jinja", "tokenizer*"]))


def _rounded(matrix: list[list[float]]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(round(value, 6) for value in row) for row in matrix)


def versions(dtype: str) -> dict[str, str]:
    found = {"dtype": dtype}
    for package in ("vllm_kvplug", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # a source checkout that is not installed
            found[package] = "not installed"
    return found
