"""`kvplug plan`: how many requests fit under a policy, with stock vLLM beside it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from vllm_kvplug.config import parse_knobs
from vllm_kvplug.errors import PolicyError

GIB = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="model folder or Hugging Face id; only its config is read")
    parser.add_argument("--policy", required=True, metavar="NAME[:JSON]", help="or NAME@X, e.g. snapkv@0.5")
    parser.add_argument("--gpu-memory", type=_positive(float), required=True, metavar="GIB", help="memory of one GPU")
    parser.add_argument(
        "--context", type=_positive(int), required=True, metavar="N", help="tokens of every prompt, and --max-model-len"
    )
    parser.add_argument("--tensor-parallel", type=_positive(int), default=1, metavar="N", help="GPUs (default 1)")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float16", "float32"], default="auto")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8"], default="auto")
    parser.add_argument(
        "--max-num-seqs", type=_positive(int), metavar="N", help="default: what vllm serve takes on a GPU of this size"
    )
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.92, metavar="X", help="default %(default)s")
    parser.add_argument("--host-gib", type=float, metavar="GIB", help="the policy's host_gib")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    result = plan(args)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        _show(result)


def plan(args: argparse.Namespace) -> dict[str, Any]:
    """The forecast of both engines and what it rests on; PolicyError if the model or the policy cannot be planned."""

    from vllm_kvplug import planning
    from vllm_kvplug.placement.pool import FP8
    from vllm_kvplug.policies.argument import read_policy
    from vllm_kvplug.policies.registry import make_policy, policy_class

    name, knobs = read_policy(args.policy)
    if args.host_gib is not None:
        knobs["host_gib"] = args.host_gib
    parse_knobs(policy_class(name).Config, name, knobs)
    config = planning.model_config(args.model)
    most = config.get_text_config().max_position_embeddings
    if args.context > most:
        raise PolicyError(f"--context {args.context} is more than the {most} tokens of this model")
    ranks = args.tensor_parallel
    dtype = _dtype(args.dtype, config)
    pages = FP8 if args.kv_cache_dtype == "fp8" else None
    policy = make_policy(name, knobs, planning.model_shape(config, args.model, ranks, (pages or dtype).itemsize))
    default_requests, max_batch = server_defaults(args.gpu_memory)
    requests = args.max_num_seqs or default_requests
    engine = planning.Engine(policy.shape, dtype, requests, max(max_batch, requests), page_dtype=pages)
    weights = planning.weight_bytes(args.model, config, dtype) // ranks
    activations = planning.activation_bytes(config, dtype, ranks, engine.max_batch, requests)
    available = int(args.gpu_memory * args.gpu_memory_utilization * GIB) - weights - activations
    if available <= 0:
        raise PolicyError(
            f"weights ({weights / GIB:.1f} GiB) and activations ({activations / GIB:.1f} GiB) do not fit in "
            f"--gpu-memory {args.gpu_memory:g}: raise it, or --tensor-parallel"
        )
    forecasts = [planning.forecast(p, engine, args.context, most, available) for p in (None, policy)]
    return {
        "model": args.model,
        "policy": {"name": name, **knobs},
        "dtype": str(dtype).removeprefix("torch."),
        "kv_cache_dtype": args.kv_cache_dtype,
        "tensor_parallel": ranks,
        "max_num_seqs": requests,
        "weight_bytes_estimate": weights,
        "activation_bytes_estimate": activations,
        "kv_bytes_estimate": available,
        "engines": [{**asdict(f), "table_bytes": f.table_bytes} for f in forecasts],
    }


def server_defaults(gib: float) -> tuple[int, int]:
    """--max-num-seqs and --max-num-batched-tokens that `vllm serve` takes on a GPU of `gib` GiB."""
    if gib >= 160:
        return 1024, 16384
    return (1024, 8192) if gib >= 70 else (256, 2048)


def _dtype(name: str, config: Any) -> Any:
    """As vLLM resolves it: weights in float32 run in bfloat16, others as they are."""
    import torch

    if name != "auto":
        return getattr(torch, name)
    saved = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
    return torch.bfloat16 if saved in (None, torch.float32) else saved


def _positive(kind: type) -> Any:
    def read(text: str) -> Any:
        value = kind(text)
        if value <= 0:
            raise argparse.ArgumentTypeError(f"{text} must be positive")
        return value

    read.__name__ = kind.__name__  # argparse names it in its message
    return read


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    stock, ours = result["engines"]
    where = f"{result['tensor_parallel']} x GPU" if result["tensor_parallel"] > 1 else "one GPU"
    title = f"{result['model']}, {result['dtype']}, {where}, prompts of {ours['context']:,} tokens"
    table = Table("", "stock", ours["policy"], title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"

    def row(label: str, show: Any) -> None:
        table.add_row(label, show(stock), show(ours))

    row("blocks in the pool", lambda e: f"{e['blocks']:,}")
    row("blocks of a request, while its prompt is computed", lambda e: f"{e['prompt_blocks']:,}")
    row("blocks of a request, after", lambda e: f"{e['decode_blocks']:,}")
    row("MiB of a request, while its prompt is computed", lambda e: _mib(e["prompt_blocks"] * e["block_bytes"]))
    row("MiB of a request, after", lambda e: _mib(e["decode_blocks"] * e["block_bytes"]))
    row("requests at once, prompts incomplete", lambda e: f"{e['prompts']:,}")
    row("requests at once, decoding", lambda e: f"{e['decoding']:,}")
    row("maximum concurrency in vLLM's log", lambda e: f"{e['max_concurrency']:.2f}")
    row("longest request, tokens", lambda e: f"{e['longest']:,}")
    row("MiB for page tables", lambda e: _mib(_tables(e)))
    row("MiB for query windows and baselines", lambda e: _mib(e["charges"]["queries"]))
    row("MiB for staging of fetched tokens", lambda e: _mib(e["charges"]["staging"]))
    row("MiB for prompt attention and scoring", lambda e: _mib(e["charges"]["workspace"]))
    if ours["host_total_bytes"]:
        row("MiB of host memory of a request", lambda e: _mib(e["host_bytes"]))
        row("MiB of host memory", lambda e: _mib(e["host_total_bytes"]))
    console = Console()
    console.print(table)
    console.print(
        f"Per GPU: {_mib(result['kv_bytes_estimate'])} MiB for all of this is an estimate, after "
        f"{_mib(result['weight_bytes_estimate'])} MiB of weights and {_mib(result['activation_bytes_estimate'])} MiB "
        f"of activations; at most {result['max_num_seqs']} requests (--max-num-seqs).",
        highlight=False,
    )


def _tables(engine: dict[str, Any]) -> int:
    return engine["charges"]["tables"] + engine["charges"]["per_block"] * engine["blocks"]


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.1f}"
