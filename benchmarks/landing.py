"""What a landing takes on one GPU: fetched tokens go from staging to their places in head pages.

    python -m benchmarks.landing --out FILE [--gib 4.1] [--repeats 20]

As in the case `tail` of benchmarks.gpu_engine: tokens of head size 128 in bfloat16, whose pages lie in random order.
`put` copies whole tokens; `kv_write`, which writes K and V of new tokens, could do the same; `copy` is torch's, of as
many bytes in order; `positions` is the other part of a landing, and `set_positions` what does it elsewhere, in torch.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.decode_kernel import microseconds
from vllm_kvplug import ops
from vllm_kvplug.placement.pool import PagePool
from vllm_kvplug.placement.tables import PageTables, TableSizes
from vllm_kvplug.shape import PAGE

DIM = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gib", type=float, default=4.1, help="of K and V that land")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    cuda = torch.device("cuda")
    pages = int(args.gib * 2**30 / (PAGE * 2 * DIM * 2))
    pool = PagePool(torch.zeros(2 * pages, PAGE, 2 * DIM, dtype=torch.bfloat16, device=cuda))
    staged = torch.randn(pages * PAGE, 2 * DIM, dtype=torch.bfloat16, device=cuda)
    chosen = torch.randperm(2 * pages, device=cuda)[:pages]
    slots = (chosen[:, None] * PAGE + torch.arange(PAGE, device=cuda)).flatten()
    tables = PageTables(TableSizes(1, 1, PAGE, 2 * pages), cuda)
    key, value = staged.unsqueeze(1).chunk(2, -1)
    runs = {
        "put": partial(pool.put, slots, staged),
        "kv_write": partial(ops.kv_write, pool.pages, key, value, slots[:, None]),
        "copy": partial(pool.pages[:pages].copy_, staged.view(pages, PAGE, 2 * DIM)),
        "positions": partial(tables.put_positions, slots, slots.int()),
        "set_positions": partial(tables.set_positions, slots, slots),
    }
    rows = []
    for name, run in runs.items():
        rows.append({"run": name, "bytes": 2 * staged.nbytes, "ms": microseconds([run], args.repeats) / 1000})
        print(rows[-1], flush=True)
    metrics = {f"landing.{row['run']}_ms": row["ms"] for row in rows}
    report.write(args.out, report.result("landing", metrics, rows))


if __name__ == "__main__":
    main()
