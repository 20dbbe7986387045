"""The command `kvplug`."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from typing import Any

from vllm_kvplug.errors import PolicyError


def serve() -> None:
    """`vllm ARGS`, also where the installed wheel has no distribution named vllm (the CPU wheel has not).

    vLLM's command asks for that distribution's version and dies without it.
    """
    stock = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return stock(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            import vllm

            # The platform is detected by this suffix.
            return vllm.__version__ if "+" in vllm.__version__ else f"{vllm.__version__}+cpu"

    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main as vllm_main

    try:
        vllm_main()
    except PolicyError as error:
        sys.exit(f"kvplug: {error}")


def policies(args: argparse.Namespace) -> None:
    """Every policy with its knobs, as a table or as JSON schema."""
    import json

    from vllm_kvplug.policies.registry import policy_class, policy_names

    classes = {}
    for name in [args.name] if args.name else policy_names():
        try:
            classes[name] = policy_class(name)
        except PolicyError as error:
            if args.name:
                raise
            print(f"kvplug: {error}", file=sys.stderr)  # one broken third-party policy hides no other
    if args.json:
        print(json.dumps({name: cls.Config.model_json_schema() for name, cls in classes.items()}, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    for name, cls in classes.items():
        headline = (cls.__doc__ or "").strip().splitlines()
        table = Table(
            "knob", "default", "meaning", title=f"{name}: {headline[0] if headline else ''}", title_justify="left"
        )
        for knob, field in cls.Config.model_fields.items():
            table.add_row(knob, str(field.get_default()), field.description or "")
        Console().print(table)


def main() -> None:
    """Entry point of the console script."""
    if sys.argv[1:2] == ["serve"]:
        sys.argv[0] = "vllm"
        return serve()
    from vllm_kvplug.calibrate import command as profile
    from vllm_kvplug.commands import check, evaluate, plan, view
    from vllm_kvplug.gates import command as gates

    parser = argparse.ArgumentParser(prog="kvplug", description="KV-cache policies for vLLM, per attention head.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("serve", help="vllm serve, with --kv-policy; works with the CPU wheel too", add_help=False)
    listing = commands.add_parser("policies", help="list the policies and their knobs")
    listing.add_argument("name", nargs="?", help="only this policy")
    listing.add_argument("--json", action="store_true", help="print JSON schemas")
    listing.set_defaults(run=policies)
    profiling = commands.add_parser(
        "profile",
        help="profile a model's heads for heterocache",
        usage="kvplug profile MODEL --texts FILE [FILE ...] [options]",  # argparse would put MODEL behind the files
    )
    profile.add_arguments(profiling)
    profiling.set_defaults(run=profile.run)
    training = commands.add_parser("train-gate", help="train the gate of wgkv or fastkvzip for a model")
    gates.add_train_arguments(training)
    training.set_defaults(run=gates.train)
    importing = commands.add_parser("import-gate", help="convert a gate that the authors of a policy published")
    gates.add_import_arguments(importing)
    importing.set_defaults(run=gates.import_gate)
    planning = commands.add_parser("plan", help="foretell how many requests fit on a GPU under a policy")
    plan.add_arguments(planning)
    planning.set_defaults(run=plan.run)
    checking = commands.add_parser("check", help="check this machine, and whether a model can have a policy")
    check.add_arguments(checking)
    checking.set_defaults(run=check.run)
    scoring = commands.add_parser("eval", help="score policies on tasks, with the memory they keep")
    evaluate.add_arguments(scoring)
    scoring.set_defaults(run=evaluate.run)
    viewing = commands.add_parser("view", help="show what a policy kept of one prompt, as an HTML page")
    view.add_arguments(viewing)
    viewing.set_defaults(run=view.run)
    args: Any = parser.parse_args()
    try:
        args.run(args)
    except PolicyError as error:
        sys.exit(f"kvplug: {error}")


if __name__ == "__main__":
    main()
