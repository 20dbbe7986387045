"""`kvplug check`: whether this machine runs policies, whether a model can have one, and a short proof."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

from vllm_kvplug.errors import PolicyError

ENTRY_POINTS = {
    "vllm.platform_plugins": "vllm_kvplug.early:install",
    "vllm.general_plugins": "vllm_kvplug.plugin:register",
}


@dataclass(frozen=True)
class Check:
    """One line of the result."""

    name: str
    ok: bool
    detail: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", help="also check whether this model can have the policy")
    parser.add_argument("--policy", default="streaming", metavar="NAME[:JSON]", help="or NAME@X (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("flags", nargs="*", metavar="-- FLAG", help="flags you mean to give to vllm serve")


def run(args: argparse.Namespace) -> None:
    """Prints every check as it is done; exit status 1 if one fails."""
    from vllm_kvplug.policies.argument import read_policy

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    name, knobs = read_policy(args.policy)
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    results = []
    shown = sys.stdout
    with redirect_stdout(sys.stderr):  # whatever vLLM prints must not get between the results
        for check in checks(args.model, name, knobs, args.flags):
            results.append(check)
            if not args.json:
                print(f"{'✓' if check.ok else '✗'} {check.name}: {check.detail}", file=shown, flush=True)
    ok = all(check.ok for check in results)
    if args.json:
        print(json.dumps({"ok": ok, "checks": [asdict(check) for check in results]}, indent=2))
    sys.exit(0 if ok else 1)


def checks(model: str | None, policy: str, knobs: dict[str, Any], flags: list[str]) -> Iterator[Check]:
    """Every check in turn. What cannot be tried without vLLM is left out where it is missing."""
    found = _try("vllm", vllm_version)
    yield found
    yield Check("libraries", True, ", ".join(f"{name} {_version(name)}" for name in ("torch", "triton", "flashinfer")))
    for group, value in ENTRY_POINTS.items():
        yield _try(f"entry point {group}", lambda group=group, value=value: entry_point(group, value))  # type: ignore[misc]
    yield _try("compiled ops", compiled_ops)
    if not found.ok:
        return
    from vllm_kvplug import compat

    yield _try("device", compat.platform)
    if model is not None:
        refusals = compat.start_up_refusals(model, policy, knobs, flags)
        yield from (Check("model", False, refusal) for refusal in refusals)
        if not refusals:
            yield Check("model", True, f"{model} can be served with --kv-policy {policy}")
    from vllm_kvplug.commands import parity

    yield _try(f"parity of {policy}", lambda: parity.compare(policy, knobs))


def _try(name: str, check: Callable[[], str]) -> Check:
    try:
        return Check(name, True, check())
    except (PolicyError, RuntimeError) as error:
        return Check(name, False, str(error))


def vllm_version() -> str:
    from vllm_kvplug import compat

    found = compat.version()
    compat.check_version(found)
    return f"{found} is supported"


def entry_point(group: str, value: str) -> str:
    """PolicyError if vLLM would not load it."""
    if value not in [entry.value for entry in entry_points(group=group)]:
        raise PolicyError(f"{value} is not installed: pip install vllm_kvplug")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "kvplug" not in allowed.split(","):
        raise PolicyError(f"VLLM_PLUGINS={allowed} leaves it out: add kvplug")
    return f"{value} is installed"


def compiled_ops() -> str:
    import torch

    from vllm_kvplug import ops

    how = ops.load_library()
    if torch.cuda.is_available() and not torch._C._dispatch_has_kernel_for_dispatch_key(
        f"{ops.NAMESPACE}::kv_write", "CUDA"
    ):
        raise PolicyError(f"{how}; they do not take CUDA tensors: install again where nvcc is found (CUDA_HOME)")
    return how


def _version(package: str) -> str:
    names = {"flashinfer": "flashinfer-python"}
    try:
        return version(names.get(package, package))
    except PackageNotFoundError:
        return "is not installed"
