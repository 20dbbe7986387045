"""Selection from the host in whole engines on one GPU: speed, requests at once and bytes, beside stock vLLM.

    python -m benchmarks.yakv_engine MODEL --out FILE [--engines yakv.60 ...] [--tokens 65536] [--host-gib 64]

Random weights do: MODEL is a folder with a config.json, and its name is the shape's in metrics. Every engine has a
process of its own.

    stock.bf16, stock.fp8   stock vLLM, its cache in the model's type and in 8 bits
    yakv.60, yakv.0         yakv with its defaults; 60% or none of what a query selects was selected in the step before

As many requests with prompts of --tokens tokens as memory holds decode together: GPU memory with all that their answers
will take, for yakv also host memory and two prompts in the making. Then half of them are aborted, and half of the rest;
at last one is left. Throughput is output tokens per second of the best of these batches, times are of --steps decode
steps in which nothing else runs.

What is not as in real use, and why that is fair:

- Prompts are not computed, which would take minutes and is not what is measured. Steps with prompt tokens leave out the
  model's layers. Stock's cache is filled with random numbers beforehand; the policy gets random K and V for every
  prompt token and does all that it does with real ones: pages, host, landmarks, the prompt's end. What decode steps
  read is as much, and lies where it would, as after real prompts.
- On random weights it means nothing which tokens consecutive queries select, so it is set, for every request, layer and
  head alike: windows of a random order of all tokens, each of which moves on by as many as are not to return. Kernels
  that choose run all the same, and write elsewhere. `returning` is what heads were seen to keep.
- Tokens are drawn at temperature 1, so that requests differ in them, and so in a mixture's experts.

Bytes from the host are those of selected tokens' codes, for one request and step: `pcie.bytes_per_step` if all of them
were fetched, `pcie.bytes_per_step_resident_set` for what yakv.60 did fetch. GPU bytes per token are those of the blocks
that one request holds once its prompt is complete, relative to a stock cache in the model's type. Metrics without a
shape are those of PLAIN.
"""

from __future__ import annotations

import argparse
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks import report
from benchmarks.engine import apart, block_bytes, engine, runtime, scheduler, used_blocks, worker
from benchmarks.gpu_engine import COMMON, prompts
from vllm_kvplug.plan import ceil_div
from vllm_kvplug.selection import Layout
from vllm_kvplug.shape import PAGE
from vllm_kvplug.worker import selection
from vllm_kvplug.worker.backend import HeadPageImpl
from vllm_kvplug.worker.selection_lines import SelectedLines
from vllm_kvplug.worker.step import Step

RETURNING = {"yakv.60": 0.6, "yakv.0": 0.0}
STOCK: dict[str, dict[str, Any]] = {"stock.bf16": {}, "stock.fp8": {"kv_cache_dtype": "fp8"}}
PLAIN = "llama-3.1-8b"

MOST = 48
"""Requests at once."""
SIZES = [1, 2, 4, *range(8, MOST + 1, 4)]
"""Of batches that decode steps are captured for."""
WARM_UP = 4
"""Steps before those that are timed."""
ANSWER = 1024
"""Tokens that an answer has room for: it goes on while later prompts come in and smaller batches are timed."""

Row = dict[str, Any]


# ---- what returns


class Elsewhere:
    """In place of `TopTokens`: it chooses as ever, and its choice is not taken."""

    def __init__(self, top: Any, room: torch.Tensor):
        self._top, self._room = top, room

    def choose(self, out: torch.Tensor, *given: Any) -> None:
        self._top.choose(self._room, *given)


class SetLines(SelectedLines):
    """Selects, in each step, tokens of which `share` were selected in the step before; for requests of one length.

    Nothing of it runs inside a graph: what is selected is written before a step.
    """

    share: ClassVar[float]

    def __init__(self, *room: Any):
        super().__init__(*room)
        self._top = Elsewhere(self._top, torch.empty_like(self._chosen))
        self._order, self._first = torch.empty(0, dtype=torch.int64), 0

    def lay_out(self, layouts: Any, rows: int) -> None:
        super().lay_out(layouts, rows)
        there = [layout for layout in layouts if layout is not None]
        if there:
            (layout,) = set(there)
            heads, width = len(there) * self.geometry.kv_heads, ceil_div(layout.selected, PAGE) * PAGE
            self._chosen[: heads * width].view(heads, width)[:, : layout.selected] = self._turn(layout)

    def _turn(self, layout: Layout) -> torch.Tensor:
        """The next tokens, ascending. Twice as many must have landmarks, of which none is excluded."""
        assert layout.excluded == 0 and 2 * layout.selected <= layout.landmarks
        device = self._chosen.device
        if len(self._order) != layout.landmarks:
            drawn = torch.randperm(layout.landmarks, generator=torch.Generator().manual_seed(0))
            self._order, self._first = drawn.to(device), 0
        self._first += layout.selected - round(self.share * layout.selected)
        place = torch.arange(self._first, self._first + layout.selected, device=device) % layout.landmarks
        return self._order[place].sort().values.int()


@contextmanager
def returning(share: float | None) -> Iterator[None]:
    """Engines that start meanwhile select by `SetLines`; none if None."""
    lines = selection.SelectedLines
    if share is not None:
        selection.SelectedLines = type("SetLines", (SetLines,), {"share": share})  # type: ignore[misc]
    try:
        yield
    finally:
        selection.SelectedLines = lines  # type: ignore[misc]


def held(llm: Any) -> torch.Tensor:
    """Which tokens the first live request's heads hold of those to select from: bool [heads, landmarks]."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    found = runtime(llm)
    request = next(iter(found.live.values()))
    layout, heads = request.selected.layout, torch.arange(found.geometry.heads, device=found.device)
    places = torch.arange(layout.stay, layout.kept, device=found.device)
    where = found.tables.locate(request.slot, heads[:, None], places)
    tokens = found.tables.positions.view(-1)[where].long() - found.selector.base
    return torch.zeros((len(heads), layout.landmarks), dtype=torch.bool, device=found.device).scatter_(1, tokens, True)


# ---- prompts that are not computed


class WithoutPrompts:
    """In place of a decoder layer's forward: leaves the layer out in steps that have prompt tokens.

    What a policy does with their K and V is done, with random ones.
    """

    def __init__(self, layer: Any):
        self._forward, self._attention = layer.forward, layer.self_attn.attn
        if isinstance(self._attention.impl, HeadPageImpl):
            self._attention.impl._attend_chunks = lambda *given: None  # type: ignore[method-assign]

    def __call__(self, positions: torch.Tensor, hidden: torch.Tensor, residual: Any, *more: Any, **named: Any) -> Any:
        from vllm.forward_context import get_forward_context

        metadata = get_forward_context().attn_metadata[self._attention.layer_name]
        ours = isinstance(metadata, Step)
        if not (metadata.prefill if ours else metadata.max_query_len > 1):
            return self._forward(positions, hidden, residual, *more, **named)
        if ours:
            impl, tokens = self._attention.impl, len(hidden)
            heads = (impl.num_heads, impl.num_kv_heads, impl.num_kv_heads)
            made = [hidden.new_empty(tokens, n, impl.head_size).normal_() for n in heads]
            impl.forward(self._attention, *made, None, metadata, torch.empty_like(made[0]))
        return hidden, hidden if residual is None else residual


def leave_out_prompts(llm: Any) -> None:
    for layer in worker(llm).get_model().model.layers:
        layer.forward = WithoutPrompts(layer)


def fill_cache(llm: Any) -> None:
    """Numbers of e4m3 that are finite, or of a normal distribution, in the whole cache."""
    layers = worker(llm).vllm_config.compilation_config.static_forward_context
    for layer in layers.values():
        if isinstance(cache := getattr(layer, "kv_cache", None), torch.Tensor) and cache.numel():
            cache.view(torch.uint8).random_(0, 0x7F) if cache.itemsize == 1 else cache.normal_()


# ---- one engine


def policy_of(llm: Any) -> Any:
    """None in stock vLLM."""
    return runtime(llm).policy if hasattr(worker(llm), "runtime") else None


def most(llm: Any, tokens: int) -> int:
    """Requests that fit with their answers, none of which is ever preempted."""
    config, policy = scheduler(llm).kv_cache_config, policy_of(llm)
    blocks, limit = config.num_blocks - 1, scheduler(llm).max_num_running_reqs
    if policy is None:
        return min(blocks // ceil_div(tokens + ANSWER, scheduler(llm).cache_config.block_size), limit)
    plan = policy.plan()
    decoding = (blocks - 2 * plan.prompt_blocks(tokens)) // plan.decode_blocks(tokens, tokens + ANSWER)
    return min(decoding, runtime(llm).selector.host.slots // policy.host_slots(tokens), limit)


class Batch:
    """Requests that decode together, more and then fewer."""

    def __init__(self, llm: Any, tokens: int):
        self.llm, self.tokens = llm, tokens
        self.names: list[str] = []

    def grow(self, count: int) -> None:
        """Step until so many decode. RuntimeError if some prompt began anew."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=1.0, max_tokens=ANSWER, ignore_eos=True, detokenize=False)
        new = [str(number) for number in range(len(self.names), count)]
        for name, prompt in zip(new, prompts(self.tokens, count)[len(self.names) :], strict=True):
            self.llm.llm_engine.add_request(name, prompt, params)
        waiting = set(new)
        while waiting:
            waiting -= {output.request_id for output in self.llm.llm_engine.step()}
        self.names += new
        if any(request.num_preemptions for request in scheduler(self.llm).running):
            raise RuntimeError(f"{count} requests of {self.tokens} tokens do not fit")

    def shrink(self, count: int) -> None:
        self.llm.llm_engine.abort_request(self.names[count:])
        del self.names[count:]

    def time(self, steps: int) -> Row:
        for _ in range(WARM_UP):
            self.llm.llm_engine.step()
        begun = time.perf_counter()
        tokens = sum(len(self.llm.llm_engine.step()) for _ in range(steps))
        seconds = time.perf_counter() - begun
        requests = len(self.names)
        return {"requests": requests, "tok_s": tokens / seconds, "tpot_ms": 1000 * seconds * requests / tokens}


def bytes_of(llm: Any, tokens: int) -> Row:
    """What the only request holds on the GPU, what its plan says, and bytes on the host of what a step selects."""
    found, policy = {"block_bytes": block_bytes(llm), "blocks_of_one": used_blocks(llm)}, policy_of(llm)
    if policy is None:
        return found
    plan, state = policy.plan(), runtime(llm)
    found |= {"planned_blocks": plan.decode_blocks(tokens, tokens), "table_bytes_per_block": state.charges.per_block}
    host = state.selector.host.codec.token_bytes
    return found | {"bytes_selected": plan.layout(tokens).selected * state.geometry.heads * host}


def measure(model: str, common: Row, name: str, tokens: int, host_gib: float, steps: int) -> list[Row]:
    """Rows of one engine, one a batch, the largest first."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # worker and scheduler are looked at, and changed
    given = STOCK.get(name, {"kv_policy": "yakv", "kv_policy_config": {"host_gib": host_gib}})
    rows: list[Row] = []
    with (
        returning(RETURNING.get(name)),
        engine(model, **common, max_model_len=tokens + ANSWER, **given) as llm,
    ):
        leave_out_prompts(llm)
        if name in STOCK:
            fill_cache(llm)
        batch, count = Batch(llm, tokens), most(llm, tokens)
        batch.grow(1)
        for _ in range(WARM_UP):  # until the prompt's blocks have come back
            llm.llm_engine.step()
        about = {"engine": name, "tokens": tokens, **bytes_of(llm, tokens)}
        batch.grow(count)
        while batch.names:
            rows.append({**about, **batch.time(steps)})
            if name in RETURNING:
                before = held(llm)
                llm.llm_engine.step()
                rows[-1]["returning"] = float((before & held(llm)).sum() / before.sum())
            print(rows[-1], flush=True)
            batch.shrink(len(batch.names) // 2)
    return rows


# ---- metrics


def metrics(shape: str, rows: list[Row]) -> dict[str, float]:
    """Of a shape's engines, as far as they have run."""
    done: dict[str, list[Row]] = {}
    for row in rows:
        if "error" not in row:
            done.setdefault(row["engine"], []).append(row)
    found: dict[str, float] = {}
    for name, batches in done.items():
        kind, _, which = name.partition(".")
        tokens, best = batches[0]["tokens"], max(batches, key=lambda row: row["tok_s"])
        part = {"yakv.60": "", "yakv.0": "returning_0."}.get(name, f"{kind}_{which}.")
        found |= {f"{shape}.{tokens}.{part}tok_s": best["tok_s"], f"{shape}.{tokens}.{part}requests": best["requests"]}
        if batches[-1]["requests"] == 1:
            found[f"{shape}.{tokens}x1.{part}tpot_ms"] = batches[-1]["tpot_ms"]
        for stock in STOCK.keys() & done.keys() if kind == "yakv" else ():
            ratio = best["tok_s"] / max(row["tok_s"] for row in done[stock])
            found[f"{shape}.{tokens}.{part}throughput_vs_{stock.replace('.', '_')}"] = ratio
    if rows_of := done.get("yakv.60"):
        found |= {f"{shape}.{name}": value for name, value in of_bytes(rows_of[0]).items()}
        found |= of_bytes(rows_of[0]) if shape == PLAIN else {}
    return found


def of_bytes(row: Row) -> dict[str, float]:
    """A block has what PAGE tokens have in a stock cache of the model's type."""
    stock = row["tokens"] / PAGE * row["block_bytes"]
    with_tables = row["blocks_of_one"] * (row["block_bytes"] + row["table_bytes_per_block"])
    return {
        "gpu_bytes_per_token_ratio": row["blocks_of_one"] * row["block_bytes"] / stock,
        "gpu_bytes_per_token_ratio_planned": row["planned_blocks"] * row["block_bytes"] / stock,
        "gpu_bytes_per_token_ratio_with_tables": with_tables / stock,
        "pcie.bytes_per_step": row["bytes_selected"],
        "pcie.bytes_per_step_resident_set": row["bytes_selected"] * (1 - row["returning"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    names = [*STOCK, *RETURNING]
    parser.add_argument("--engines", nargs="+", choices=names, default=names)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--host-gib", type=float, default=64, help="pinned; torch takes the next power of two")
    parser.add_argument("--steps", type=int, default=64, help="of each batch that are timed")
    args = parser.parse_args()
    captured = {"compilation_config": {**COMMON.get("compilation_config", {}), "cudagraph_capture_sizes": SIZES}}
    common = COMMON | {"dtype": args.dtype, "max_num_seqs": MOST} | ({} if "enforce_eager" in COMMON else captured)
    rows: list[Row] = []
    for name in args.engines:
        begun = time.monotonic()
        try:
            rows += apart(partial(measure, args.model, common, name, args.tokens, args.host_gib, args.steps))
        except Exception:  # one engine that fails must not hide the others
            rows.append({"engine": name, "error": traceback.format_exc()[-600:]})
            print(rows[-1], flush=True)
        print(f"{name}: {time.monotonic() - begun:.0f} s in all", flush=True)
        shape = Path(args.model).name.lower()
        report.write(args.out, report.result(f"{shape} engines", metrics(shape, rows), rows))


if __name__ == "__main__":
    main()
