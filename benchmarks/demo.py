"""Serves a small model with a KV policy and without, and shows what a long prompt holds in each.

bash benchmarks/demo.sh [--policy heterocache] [--config JSON] [--model DIR] [--tokens 1500]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.small_model import default_folder, make

QUESTION = "In one sentence: what does this documentation describe?"


def long_prompt(tokenizer: Any, tokens: int) -> str:
    """About `tokens` tokens of this project's own documentation, and a question about it."""
    root = Path(__file__).parent.parent
    text = "\n\n".join(p.read_text() for p in (root / "README.md", *sorted((root / "docs").glob("*.md"))))
    ids = tokenizer(text)["input_ids"][: tokens - 60]
    return tokenizer.decode(ids) + "\n\n" + QUESTION


@contextmanager
def server(model: str, *arguments: str) -> Iterator[str]:
    """`vllm serve` on a free local port, through the command that also works with the CPU wheel. Yields its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm_kvplug.cli", "serve", model, "--host", "127.0.0.1", "--port", str(port)]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", **os.environ}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([*command, *arguments], stdout=log, stderr=log, env=environment)
        url = f"http://127.0.0.1:{port}"
        try:
            _wait(process, url, log)
            yield url
        finally:
            process.terminate()
            process.wait(60)


def _wait(process: subprocess.Popen, url: str, log: Any) -> None:
    deadline = time.time() + 600
    while time.time() < deadline:
        if process.poll() is not None:
            log.seek(0)
            sys.exit(log.read()[-3000:] + "\nthe server did not start")
        try:
            urllib.request.urlopen(url + "/health", timeout=2)
            return
        except OSError:
            time.sleep(1)
    sys.exit("the server did not answer within 10 minutes")


def held_bytes(url: str, model_dir: str, item_size: int) -> int:
    """KV bytes in use, from the server's own /metrics: usage * blocks * bytes of a block."""
    from prometheus_client.parser import text_string_to_metric_families

    text = urllib.request.urlopen(url + "/metrics").read().decode()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    usage = next(s.value for s in samples if s.name == "vllm:kv_cache_usage_perc")
    cache = next(s.labels for s in samples if s.name == "vllm:cache_config_info")
    config = json.loads((Path(model_dir) / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * item_size
    # One block is vLLM's null block and never counts as used.
    return round(usage * (int(cache["num_gpu_blocks"]) - 1)) * int(cache["block_size"]) * token


def ask(url: str, model: str, prompt: str, item_size: int) -> dict[str, Any]:
    """Streams one answer through the openai client; KV bytes are read once the prompt is in."""
    from openai import OpenAI

    client = OpenAI(base_url=url + "/v1", api_key="none")
    begin = time.time()
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": prompt}], max_tokens=48, temperature=0, stream=True,
        stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
    )  # fmt: skip
    answer, first, held, usage = "", 0.0, 0, None
    pieces = 0
    for chunk in stream:
        usage = chunk.usage or usage
        if not chunk.choices or not chunk.choices[0].delta.content:
            continue
        answer += chunk.choices[0].delta.content
        pieces += 1
        first = first or time.time() - begin
        if pieces == 8:  # a few tokens in, so that the server's gauge is of a decoding step
            held = held_bytes(url, model, item_size)
    return {
        "answer": answer.strip(),
        "prompt_tokens": usage.prompt_tokens,
        "first_token_s": first,
        "total_s": time.time() - begin,
        "kv_bytes": held,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="heterocache")
    parser.add_argument("--config", default="{}", help="knobs of the policy, JSON")
    parser.add_argument("--model", help="Hugging Face folder; default: a small model, made if need be")
    parser.add_argument("--tokens", type=int, default=1500)
    args = parser.parse_args()
    model = args.model or str(make(default_folder()))
    import torch
    from transformers import AutoTokenizer

    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    prompt = long_prompt(AutoTokenizer.from_pretrained(model), args.tokens)
    common = ("--dtype", dtype, "--enforce-eager", "--max-model-len", "4096", "--max-num-seqs", "8")
    runs = {
        f"--kv-policy {args.policy}": ("--kv-policy", args.policy, "--kv-policy-config", args.config),
        "stock vLLM": (),
    }
    results = {}
    for name, flags in runs.items():
        print(f"serving {model} with {name} ...", flush=True)
        with server(model, *common, *flags) as url:
            ask(url, model, "Hello", 4)  # the first request pays for warm-up
            results[name] = ask(url, model, prompt, 2 if dtype == "bfloat16" else 4)
    show(results)


def show(results: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    stock = results["stock vLLM"]["kv_bytes"]
    table = Table("", "prompt tokens", "KV bytes after the prompt", "of stock", "first token", "48 tokens")
    for name, r in results.items():
        table.add_row(
            name,
            str(r["prompt_tokens"]),
            f"{r['kv_bytes']:,}",
            f"{r['kv_bytes'] / stock:.1%}",
            f"{r['first_token_s']:.2f} s",
            f"{r['total_s']:.2f} s",
        )
    for name, r in results.items():
        print(f"\n{name} answers: {r['answer']}")
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
