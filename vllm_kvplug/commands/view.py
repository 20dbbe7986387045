"""`kvplug view`: what a policy kept of one prompt, and what happened while it was answered, as an HTML page."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vllm_kvplug.config import explain, parse_knobs, read_knobs
from vllm_kvplug.errors import PolicyError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="OUT.html", help="the page to write")
    parser.add_argument("--model", metavar="MODEL", help="model folder or Hugging Face id")
    parser.add_argument("--kv-policy", metavar="NAME", help="or NAME@X, e.g. snapkv@0.5")
    parser.add_argument("--kv-policy-config", default="{}", metavar="JSON", help="its knobs")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE")
    prompt.add_argument("--text", metavar="TEXT", help="the prompt itself")
    parser.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="of the answer (default %(default)s)")
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="more arguments of vllm.LLM")
    parser.add_argument("--record", type=Path, metavar="FILE", help="also save what the page is made from")
    parser.add_argument("--from", type=Path, dest="source", metavar="FILE", help="a saved record, instead of an engine")
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="also draw the heat map")


def run(args: argparse.Namespace) -> None:
    from vllm_kvplug.view import page, plot
    from vllm_kvplug.view.record import Record

    if args.png and find_spec("matplotlib") is None:  # say so before the engine starts
        raise PolicyError("view: --png needs matplotlib: pip install matplotlib")
    try:
        record = Record.model_validate_json(args.source.read_text() if args.source else _recorded(args))
    except OSError as error:
        raise PolicyError(f"view: {error}") from None
    except ValidationError as error:
        raise PolicyError(f"view: {args.source} is no record of kvplug view: {explain(error)}") from None
    if args.record:
        args.record.write_text(record.model_dump_json() + "\n")
    args.out.write_text(page.render(record), encoding="utf-8")
    if args.png:
        plot.save_plot(record, args.png)
    print(f"{record.policy} kept {record.share():.1%} of {record.tokens:,} prompt tokens over {record.heads} heads")
    print(f"written to {args.out}")


def _recorded(args: argparse.Namespace) -> str:
    """Run the request in an engine, in a process of its own; the record as JSON."""
    from vllm_kvplug import compat

    job = _job(args)
    with tempfile.TemporaryDirectory() as scratch:
        asked, out = Path(scratch) / "job.json", Path(scratch) / "record.json"
        asked.write_text(json.dumps(job))
        command = [sys.executable, "-m", "vllm_kvplug.view.recorder", str(asked), str(out)]
        if subprocess.run(command, env={**os.environ, **compat.IN_PROCESS}).returncode:
            raise PolicyError("view: the engine failed; what it said is above")
        return out.read_text()


def _job(args: argparse.Namespace) -> dict[str, Any]:
    """What is wrong is said before an engine starts."""
    from transformers import AutoTokenizer

    from vllm_kvplug.policies.argument import read_policy
    from vllm_kvplug.policies.registry import policy_class

    if not args.model or not args.kv_policy or (args.text is None and args.prompt_file is None):
        raise PolicyError("view: give --model, --kv-policy and --prompt-file or --text; or --from FILE")
    if args.engine.get("tensor_parallel_size", 1) != 1:
        raise PolicyError("view: looks into one worker: remove tensor_parallel_size from --engine")
    if args.max_tokens < 1:
        raise PolicyError("view: --max-tokens must be at least 1")
    name, knobs = read_policy(args.kv_policy)
    knobs |= read_knobs(args.kv_policy_config)
    parse_knobs(policy_class(name).Config, name, knobs)
    text = args.prompt_file.read_text() if args.text is None else args.text
    prompt = _token_ids(AutoTokenizer.from_pretrained(args.model), text, args.chat)
    engine = {"model": args.model, "max_model_len": len(prompt) + args.max_tokens, **args.engine}
    engine |= {"kv_policy": name, "kv_policy_config": knobs}
    return {"engine": engine, "knobs": knobs, "prompt": prompt, "max_tokens": args.max_tokens}


def _token_ids(tokenizer: Any, text: str, chat: bool) -> list[int]:
    if chat:
        template = {"add_generation_prompt": True, "return_dict": True}
        ids = tokenizer.apply_chat_template([{"role": "user", "content": text}], **template)["input_ids"]
    else:
        ids = tokenizer(text)["input_ids"]
    if not ids:
        raise PolicyError("view: the prompt is empty")
    return list(ids)
