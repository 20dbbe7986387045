"""The parts of selection by themselves: landmarks in pages, ranks, what is fetched, and the memory it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_memory import PeakMemory

from vllm_kvplug import memory
from vllm_kvplug.components.landmarks import FORMATS, LandmarkPages
from vllm_kvplug.components.selection import best, group_attention, replace_misses
from vllm_kvplug.memory import Geometry
from vllm_kvplug.placement.pool import PagePool
from vllm_kvplug.placement.tables import PageTables
from vllm_kvplug.policies.registry import make_policy
from vllm_kvplug.quant.higgs import Higgs
from vllm_kvplug.quant.residual import ResidualHiggs, group_means, spread
from vllm_kvplug.shape import ModelShape
from vllm_kvplug.tiers.codecs import Codec
from vllm_kvplug.tiers.host import HostPool
from vllm_kvplug.tiers.lane import Lane
from vllm_kvplug.worker.requests import LiveRequest
from vllm_kvplug.worker.selection import TokenSelector

CPU = torch.device("cpu")


def decoded(name: str, keys: torch.Tensor) -> torch.Tensor:
    """keys [H, n, d] as a format stands for them; n a multiple of 8."""
    if name == "higgs2":
        higgs = Higgs(2, keys.shape[-1])
        return higgs.decode(*higgs.encode(keys))
    if name == "residual":
        residual = ResidualHiggs(keys.shape[-1])
        return residual.decode(residual.encode(keys))
    return spread(group_means(keys.float()).half().float(), keys.shape[1])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dim, itemsize", [(32, 4), (64, 2), (80, 2), (128, 1)])
@pytest.mark.parametrize("tokens", [8, 200, 1000])
def test_pages_score_as_their_keys(name: str, dim: int, itemsize: int, tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    keys, query = (torch.randn(*shape, dim, generator=generator) for shape in ((3, tokens), (3, 2)))
    pages = LandmarkPages(name, dim, 16 * 2 * dim * itemsize)
    encoded = pages.encode(keys)
    assert encoded.dtype == torch.uint8 and encoded.shape == (3, -(-tokens // pages.tokens), pages.page_bytes)
    expected = query @ decoded(name, keys).transpose(-1, -2)
    # Two rows, the pages of all heads in any order, and pages of others between them.
    order = torch.randperm(3 * encoded.shape[1] + 4, generator=generator)[: 3 * encoded.shape[1]]
    pool = torch.full((len(order) + 4, pages.page_bytes), 255, dtype=torch.uint8)
    pool[order] = encoded.flatten(0, 1)
    page = order.view(1, 3, -1).expand(2, -1, -1)
    found = pages.score(torch.stack([query, -query]), pool, page)[..., :tokens]
    assert torch.allclose(found, torch.stack([expected, -expected]), atol=1e-4, rtol=1e-4)


def test_bytes_of_landmarks() -> None:
    """Of 128 values in 16-bit pages: 34 bytes a token in 2 bits, 26.25 with residuals, 32 for means."""
    found = {name: LandmarkPages(name, 128, 8192) for name in FORMATS}
    assert {name: pages.format.group_bytes for name, pages in found.items()} == {
        "higgs2": 8 * 34,
        "residual": 210,
        "means8": 256,
    }
    assert {name: pages.tokens for name, pages in found.items()} == {"higgs2": 240, "residual": 312, "means8": 256}


def test_the_group_and_what_is_not_there() -> None:
    scores = torch.tensor([[[0.0, 2.0, 50.0], [1.0, 0.0, 50.0]]])
    weights = group_attention(scores, torch.tensor([[True, True, False]]))
    high = torch.tensor([[0.0, 2.0], [1.0, 0.0]]).softmax(-1).amax(0)
    assert torch.allclose(weights[0, :2], high) and weights[0, 2] == 0
    assert best(torch.tensor([3.0, 1.0, 3.0, 2.0]), 3).tolist() == [0, 2, 3]


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_misses_replace_what_is_not_wanted(data: st.DataObject) -> None:
    tokens, width = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 6))
    counts = data.draw(st.lists(st.integers(0, min(width, tokens)), min_size=1, max_size=3))
    rows = [[data.draw(st.permutations(range(tokens)))[:n] + [0] * (width - n) for n in counts] for _ in range(2)]
    wanted, held = (torch.tensor(part) for part in rows)
    on = torch.arange(width) < torch.tensor(counts)[:, None]
    after, changed = replace_misses(wanted, held, on, tokens)
    for row, count in enumerate(counts):
        want, had = wanted[row, :count].tolist(), held[row, :count].tolist()
        assert sorted(after[row, :count].tolist()) == sorted(want)
        for place in range(width):
            stays = place >= count or had[place] in want
            assert changed[row, place] != stays
            assert not stays or after[row, place] == held[row, place]


@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize("landmarks, ratio", [("higgs2", 0.1), ("higgs2", 0.6), ("residual", 0.1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_selection_takes_no_more_than_is_charged(landmarks: str, ratio: float, rows: int, dtype: torch.dtype) -> None:
    """The landmarks of the longest prompt, and a step of so many rows of it, one or a tile."""
    tokens, shape = 3000, ModelShape(1, 2, 4, 64, rotary=(0.1,) * 32, page_itemsize=dtype.itemsize)
    policy = make_policy("yakv", {"landmarks": landmarks, "ratio": ratio, "max_request_budget": ratio}, shape)
    geometry = Geometry.of_rank(shape, 0, dtype, max_requests=rows, max_tokens=tokens)
    blocks = 200
    tables = PageTables(geometry.table_sizes(blocks, policy), CPU)
    pool = PagePool(torch.randn(blocks * 2, 16, 128).to(dtype))
    host = HostPool(60, Codec("higgs4", 64, dtype), pin=False, heads=2)
    lane = Lane(CPU)
    selector = TokenSelector(policy, geometry, pool, tables, host, lane)
    row = torch.arange(1, 200, dtype=torch.int32)[None]
    tables.extend(0, row, 0, tokens, 0, 1 << 30)
    request = LiveRequest(0, tokens, tokens, policy, policy.plan(), row=row)
    selector.begin(request)
    key = torch.randn(tokens, 2, 64).to(dtype)
    selector.store(request, 0, 0, key, key)
    charged = memory.selecting_bytes(policy, geometry, in_lines=False)
    with torch.inference_mode(), PeakMemory() as making:
        selector.end_prompt(request, 0)
    selector.prepare([request] * rows, rows)
    with torch.inference_mode(), PeakMemory() as selecting:
        selector.select(torch.zeros(rows, dtype=torch.int32), 0, torch.randn(1, 4, 64).expand(rows, -1, -1).to(dtype))
    lane.close()
    attending = 4 * geometry.kv_heads * tokens * 64 * dtype.itemsize
    assert making.most <= max(charged, attending) and selecting.most <= charged
    assert max(making.most, selecting.most) >= 0.3 * charged
    assert memory.selecting_table_bytes(policy, geometry) == sum(
        t.numel() * t.element_size() for t in (selector.layouts, selector.blocks, selector.host_slots)
    )
    assert memory.selecting_bytes(make_policy("snapkv", {}, shape), replace(geometry), in_lines=False) == 0
