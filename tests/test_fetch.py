"""Tokens from host memory into pages: the op against codec, RoPE and pool in plain torch."""

from __future__ import annotations

import pytest
import torch

from vllm_kvplug import ops
from vllm_kvplug.placement.pool import FP8, PagePool
from vllm_kvplug.quant.grids import load_grid
from vllm_kvplug.rotary import Rotary
from vllm_kvplug.tiers.codecs import Codec

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
PAGES = 6


def frequencies(rotated: int, device: str = "cpu") -> torch.Tensor:
    return 1.0 / 10_000 ** (torch.arange(0, rotated, 2, device=device).float() / max(rotated, 1))


def tokens(
    count: int, dim: int, dtype: torch.dtype, name: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Codec]:
    generator = torch.Generator().manual_seed(count + dim)
    key, value = (torch.randn(count, dim, generator=generator).to(dtype) for _ in range(2))
    codec = Codec(name, dim, dtype)
    return key, value, codec.encode(key, value), codec


def fetch(
    pool: torch.Tensor, rows: torch.Tensor, lists: list[torch.Tensor], angles: torch.Tensor, codec: Codec
) -> None:
    grid = load_grid(4, pool.device) if codec.name == "higgs4" else None
    rows = rows.pin_memory() if pool.is_cuda else rows
    lists = [part.to(pool.device) for part in lists]
    ops.fetch_tokens(pool, rows, *lists, angles.to(pool.device), grid, codec.dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pages", ["as they are", "fp8"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("name", ["auto", "higgs4"])
@pytest.mark.parametrize(
    "dim, rotated", [(16, 16), (32, 32), (64, 64), (80, 32), (96, 96), (128, 128), (256, 256), (64, 0)]
)
def test_fetched_tokens(dim: int, rotated: int, name: str, dtype: torch.dtype, pages: str, device: str) -> None:
    """Some of them, in any order; whatever else is in the pool stays, poison included."""
    key, value, rows, codec = tokens(50, dim, dtype, name)
    source = torch.tensor([7, -1, 49, 0, 30, -1, 7])
    position = torch.tensor([0, 5, 131_071, 17, 4_000, 0, 3])
    dest = torch.tensor([95, 1, 0, 33, 34, 2, 16])
    stored = FP8 if pages == "fp8" else dtype
    pool = torch.full((PAGES, 16, 2 * dim), torch.nan).to(stored).to(device)
    fetch(pool, rows, [source, position, dest], frequencies(rotated), codec)

    on = source >= 0
    expected_key, expected_value = codec.decode(rows[source[on]]).chunk(2, -1)
    expected_key = Rotary(frequencies(rotated), 1.0).rotate(expected_key, position[on])
    reference = PagePool(torch.full((PAGES, 16, 2 * dim), torch.nan).to(stored), dtype)
    reference.put(dest[on], torch.cat([expected_key.to(dtype), expected_value], -1))
    found, expected = pool.cpu().float().view(-1, 2 * dim), reference.pages.float().view(-1, 2 * dim)
    assert (found.isnan() == expected.isnan()).all() and int((~found[:, 0].isnan()).sum()) == 5
    tolerance = 0.13 if pages == "fp8" else TOLERANCE[dtype]
    assert torch.allclose(found.nan_to_num(), expected.nan_to_num(), rtol=tolerance, atol=tolerance)
    assert key.shape == value.shape


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_not_finite(device: str) -> None:
    """A NaN stays one; what exceeds e4m3 becomes its largest number; nothing fetched is nothing written."""
    codec = Codec("auto", 16, torch.float32)
    key, value = torch.full((3, 16), 1000.0), torch.full((3, 16), -1000.0)
    key[1, 3] = torch.nan
    rows = codec.encode(key, value)
    pool = torch.zeros(1, 16, 32).to(FP8).to(device)
    fetch(
        pool,
        rows,
        [torch.tensor([0, 1]), torch.zeros(2, dtype=torch.int64), torch.tensor([4, 5])],
        frequencies(0),
        codec,
    )
    found = pool.cpu().float()[0]
    assert (found[4, :16] == 448).all() and (found[4, 16:] == -448).all()
    assert found[5].isnan().nonzero().tolist() == [[3]] and not found[[0, 1, 2, 3, 6, 15]].any()
    fetch(pool, rows, [torch.empty(0, dtype=torch.int64)] * 3, frequencies(0), codec)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["auto", "higgs4"])
@pytest.mark.parametrize("count", [0, 1, 9, 9_000, 20_000])
def test_as_many_as_the_device_says(count: int, name: str, device: str) -> None:
    """Of a list that is longer, with nonsense behind them; of more than there are, all."""
    _, _, rows, codec = tokens(40, 32, torch.float32, name)
    items = 9_100  # more than one turn of the blocks that take them
    source = torch.arange(items) % 40
    source[count:] = 1 << 40
    lists = [source, torch.arange(items) % 7, torch.randperm(items)]
    pools = [torch.zeros(items // 16 + 1, 16, 64) for _ in range(2)]
    fetch(pools[0], rows, [part[:count].contiguous() for part in lists], frequencies(32), codec)
    pool, grid = pools[1].to(device), load_grid(4, torch.device(device)) if name == "higgs4" else None
    rows = rows.pin_memory() if device == "cuda" else rows
    number = torch.tensor([count], dtype=torch.int32, device=device)
    lists = [part.to(device) for part in lists]
    ops.fetch_tokens(pool, rows, *lists, frequencies(32, device), grid, torch.float32, number)
    torch.testing.assert_close(pool.cpu(), pools[0], atol=1e-5, rtol=1e-5)
    assert bool(pool.any()) == (count > 0)


def test_wrong_arguments() -> None:
    codec = Codec("higgs4", 32, torch.float32)
    rows, grid = torch.zeros(9, codec.token_bytes, dtype=torch.uint8), load_grid(4, torch.device("cpu"))
    one, angles = torch.zeros(1, dtype=torch.int64), frequencies(32)

    def call(
        pool: torch.Tensor, *lists: torch.Tensor, rows: torch.Tensor = rows, angles: torch.Tensor = angles
    ) -> None:
        ops.fetch_tokens(pool, rows, *lists, angles, grid, torch.float32)

    good = torch.zeros(2, 16, 64)
    call(good, one, one, one)
    for wrong, words in (
        (lambda: call(good.half(), one, one, one), "pool must be"),
        (lambda: call(torch.zeros(2, 16, 256), one, one, one), "do not hold codes"),
        (lambda: call(good, one.int(), one, one), "source must be"),
        (lambda: call(good, one, one[:0], one), "position must be"),
        (lambda: call(good, one, one, one.float()), "dest must be"),
        (lambda: call(good, one, one, one, rows=rows.float()), "rows must be"),
        (lambda: call(good, one, one, one, angles=frequencies(64)), "frequencies must be"),
        (lambda: ops.fetch_tokens(good, rows, one, one, one, angles, grid, torch.float32, one), "count must be"),
    ):
        with pytest.raises(RuntimeError, match=words):
            wrong()
    with pytest.raises(IndexError, match="row 9 is outside a host pool of 9"):
        call(good, one + 9, one, one)
    with pytest.raises(IndexError, match="token slot 32 is outside a pool of 32"):
        call(good, one, one, one + 32)
