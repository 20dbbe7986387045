"""The parts of page selection by themselves: scores and bounds of pages, and the memory it takes."""

from __future__ import annotations

import pytest
import torch
from test_memory import PeakMemory

from vllm_kvplug import memory
from vllm_kvplug.components.selection import page_scores
from vllm_kvplug.memory import Geometry
from vllm_kvplug.placement.integrity import head_pages
from vllm_kvplug.placement.pool import PagePool
from vllm_kvplug.placement.tables import PageTables
from vllm_kvplug.policies.registry import make_policy
from vllm_kvplug.shape import ModelShape
from vllm_kvplug.worker.page_selection import PageSelector
from vllm_kvplug.worker.requests import LiveRequest

CPU = torch.device("cpu")
SHAPE = ModelShape(1, 2, 4, 64, page_itemsize=4)


def test_scores_are_the_best_within_bounds() -> None:
    low, query = torch.randn(3, 5, 8), torch.randn(3, 2, 8)
    high = low + torch.rand_like(low)
    found = page_scores(query, low, high)
    for head in range(3):
        for page in range(5):
            best = [torch.maximum(q * low[head, page], q * high[head, page]).sum() for q in query[head]]
            assert torch.allclose(found[head, page], torch.stack(best).max(), atol=1e-5)


def selector_of(tokens: int, ratio: float) -> tuple[PageSelector, LiveRequest, Geometry]:
    policy = make_policy("quest", {"ratio": ratio, "dense_layers": 0}, SHAPE)
    geometry = Geometry.of_rank(SHAPE, 0, torch.float32, max_requests=1, max_tokens=tokens)
    tables = PageTables(geometry.table_sizes(210, policy), CPU)
    row = torch.arange(1, 210, dtype=torch.int32)[None]
    place = tables.extend(0, row, 0, tokens, 0, 1 << 30)
    selector = PageSelector(0, geometry, PagePool(torch.zeros(420, 16, 128)), tables, 1)
    request = LiveRequest(0, tokens - 1, tokens - 1, policy, policy.plan(), row=row)
    selector.note(place, torch.randn(tokens, 2, 64, generator=torch.Generator().manual_seed(1)))
    return selector, request, geometry


def test_bounds_of_pages_in_pieces() -> None:
    """Written in any pieces, and again by the next owner: of the keys that were written since a page began."""
    selector, _, _ = selector_of(100, 0.5)
    keys, place = torch.randn(40, 2, 64), torch.arange(40)[:, None] + torch.tensor([160, 800])
    for piece in (slice(0, 7), slice(7, 8), slice(8, 33), slice(33, 40)):
        selector.note(place[piece], keys[piece])
    selector.note(torch.full((1, 2), -1), torch.full((1, 2, 64), torch.nan))
    for head, first in enumerate((10, 50)):
        for page in range(3):
            written = keys[page * 16 : (page + 1) * 16, head]
            found = selector.bounds[first + page]
            assert found[0].equal(written.amin(0)) and found[1].equal(written.amax(0))


@pytest.mark.parametrize("ratio", [0.05, 0.9])
def test_selection_takes_no_more_than_is_charged(ratio: float) -> None:
    selector, request, geometry = selector_of(3000, ratio)
    selector.prepare([request], [3000], 1)
    with torch.inference_mode(), PeakMemory() as peak:
        attended = selector.select(torch.zeros(1, dtype=torch.int32), 0, torch.randn(1, 4, 64))
    pages = request.policy.attended_pages(3000)
    assert attended is not None and attended.lengths.tolist() == [[16 * (pages - 1) + 8] * 2]
    charged = memory.page_selecting_bytes(request.policy, geometry)
    assert 0.3 * charged <= peak.most <= charged
    assert memory.bound_bytes(request.policy, geometry) == selector.bounds[0].nbytes


def test_bounds_made_anew_from_what_is_stored() -> None:
    """Of a request whose heads store 100 and 37 tokens by now; other pages' stay. In the workspace of its prompt."""
    selector, request, geometry = selector_of(3000, 0.5)
    pages, tables = selector.pool.pages, selector.tables
    pages.normal_()
    tables.lengths[0] = torch.tensor([100, 37])
    before = selector.bounds.clone()
    with torch.inference_mode(), PeakMemory() as peak:
        selector.renew(0, 3000)
    assert 0 < peak.most <= memory.workspace_bytes(request.policy, geometry, in_lines=True)
    renewed = []
    for head, length in enumerate((100, 37)):
        ids = head_pages(tables, 0, head)
        for number, page in enumerate(ids):
            keys = pages[page, : length - 16 * number, :64]
            assert selector.bounds[page].equal(torch.stack([keys.amin(0), keys.amax(0)]))
        renewed += ids
    others = [page for page in range(len(pages)) if page not in renewed]
    assert selector.bounds[others].equal(before[others])
