"""`kvplug train-gate` and `kvplug import-gate`: their arguments. What they do is in run.py, which imports torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_kvplug import spread


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    for kind, what in (("wgkv", "write gate of WG-KV"), ("fastkvzip", "gate of Fast KVzip")):
        usage = f"kvplug train-gate {kind} MODEL --texts FILE [FILE ...] [options]"
        one = kinds.add_parser(kind, help=what, usage=usage)
        one.set_defaults(kind=kind)
        _add_common(one)
        (_add_write if kind == "wgkv" else _add_sink)(one)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="model folder or Hugging Face id")
    parser.add_argument(
        "--texts",
        metavar="FILE",
        type=Path,
        nargs="+",
        required=True,
        help="plain text files, or .jsonl with a 'text' field a line",
    )
    parser.add_argument("--out", type=Path, help="gate to write (default profiles/<model>-<kind>.safetensors)")
    parser.add_argument("--int8", action="store_true", help="store matrices in 8 bits instead of bfloat16")
    parser.add_argument("--device", help="default: cuda if there is one")
    spread.add_argument(parser)
    parser.add_argument("--seed", type=int, help="default 0")
    # What is not given here keeps the default of the training's settings.
    parser.add_argument("--length", type=int, help="most tokens of a sequence (wgkv: 4096, fastkvzip: 30000)")
    parser.add_argument("--steps", type=int, help="default: one pass over the texts (wgkv), 5000 (fastkvzip)")
    parser.add_argument("--learning-rate", type=float, help="default 1e-3 (wgkv), 0.2 (fastkvzip)")


def _add_write(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, help="tokens of texts to use (default all)")
    parser.add_argument("--batch", type=int, help="sequences a step, which --ray spreads (default 1)")
    parser.add_argument(
        "--lambda", dest="sparsity_weight", type=float, metavar="X", help="higher admits less (default 0.04)"
    )
    parser.add_argument("--window", type=int, help="local window W (default 256)")
    parser.add_argument("--hidden", type=int, help="hidden units a head (default 4 times the head dim)")
    parser.add_argument("--tau", type=float, help="admission threshold (default 0.1)")
    parser.add_argument(
        "--sparsity", choices=["remaining", "paper"], help="form of the sparsity loss: released (default) or printed"
    )


def _add_sink(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, help="tokens of texts to use (default 1000000)")
    parser.add_argument("--chunk", type=int, help="tokens that are repeated at a time (default 2000)")
    parser.add_argument("--dim", type=int, help="size of the gate's queries and keys, D' (default 16)")
    parser.add_argument("--sinks", type=int, help="sink keys a head, S (default 16)")
    parser.add_argument("--batch", type=int, help="tokens a step (default 1000)")
    parser.add_argument(
        "--memory-gib", type=float, default=16.0, help="for hidden states of layers at a time (default %(default)s)"
    )


def train(args: argparse.Namespace) -> None:
    from vllm_kvplug.gates import run

    run.train(args)


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=["wgkv", "fastkvzip"])
    parser.add_argument("model", metavar="MODEL", help="model folder or Hugging Face id that the gate is for")
    parser.add_argument("file", metavar="FILE", type=Path, help="the authors' .pt file")
    parser.add_argument("--out", type=Path, required=True, help="gate to write")
    parser.add_argument("--int8", action="store_true", help="store matrices in 8 bits instead of bfloat16")
    parser.add_argument(
        "--double-bias",
        action="store_true",
        help="fastkvzip: the bias as the released trainer used it, which added it twice",
    )


def import_gate(args: argparse.Namespace) -> None:
    from vllm_kvplug.gates import run

    run.import_gate(args)
