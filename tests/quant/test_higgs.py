"""The HIGGS ops against plain torch: codes bit for bit, decoded rows and scores to rounding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_higgs import decode, encode

from vllm_kvplug import ops
from vllm_kvplug.quant.grids import Bits, load_grid
from vllm_kvplug.quant.higgs import Higgs

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BITS: list[Bits] = [1, 2, 4]
NAN, INF = float("nan"), float("inf")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def device(request):
    return request.param


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def grid_of(bits: Bits) -> torch.Tensor:
    return load_grid(bits, torch.device("cpu"))


# ------------------------------------------------------------------------------------------ encode and decode


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [1, 7, 16, 17, 64, 80, 128, 256])
@pytest.mark.parametrize("spread", [1e-4, 1.0, 300.0])
def test_is_the_plain_reference(device: str, dim: int, bits: Bits, dtype: torch.dtype, spread: float):
    higgs = Higgs(bits, dim)
    x = (randn(150, dim) * spread).to(dtype)
    # First the op: the reference's freed buffers could otherwise hand it the right answer.
    codes, scale = (t.cpu() for t in higgs.encode(x.to(device)))
    found = higgs.decode(codes.to(device), scale.to(device), dtype).cpu()

    expected_codes, expected_scale = encode(x, grid_of(bits), higgs.group)
    assert torch.equal(codes, expected_codes) and torch.equal(scale, expected_scale)
    assert codes.shape == (150, higgs.pieces) and codes.dtype == torch.uint8 and scale.dtype == torch.float16
    assert found.dtype == dtype and found.shape == x.shape
    expected = decode(expected_codes, expected_scale, grid_of(bits), dim)
    # Sums of `group` float32 cancel: what counts is the error beside the row's norm, and the last rounding.
    tolerance = 1e-6 * expected_scale.double()[:, None] + expected.abs() * torch.finfo(dtype).eps / 2
    tolerance += torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert ((found.double() - expected).abs() <= tolerance * 1.01).all()


@settings(max_examples=60, deadline=None)
@given(
    lead=st.lists(st.integers(0, 4), max_size=3).map(tuple),
    dim=st.integers(1, 256),
    bits=st.sampled_from(BITS),
    seed=st.integers(0, 99),
)
def test_any_shape(lead: tuple[int, ...], dim: int, bits: Bits, seed: int):
    higgs = Higgs(bits, dim)
    x = randn(*lead, dim, seed=seed)
    codes, scale = higgs.encode(x)
    assert codes.shape == (*lead, higgs.pieces) and scale.shape == lead
    flat_codes, flat_scale = encode(x.reshape(-1, dim), grid_of(bits), higgs.group)
    assert torch.equal(codes.view(-1, higgs.pieces), flat_codes) and torch.equal(scale.view(-1), flat_scale)
    back = higgs.decode(codes, scale)
    assert back.shape == x.shape
    expected = decode(flat_codes, flat_scale, grid_of(bits), dim).view(*lead, dim)
    torch.testing.assert_close(back.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("bits, mse", [(4, 0.0079), (2, 0.097), (1, 0.321)])
def test_error_of_gaussian_keys(device: str, bits: Bits, mse: float):
    """A little below the grid's: the norm is kept, which leaves values a touch less spread than Gaussian ones."""
    x = randn(4000, 128)
    higgs = Higgs(bits, 128)
    error = (higgs.decode(*higgs.encode(x.to(device))).cpu() - x).square().mean().item()
    assert 0.95 * mse < error < 1.01 * mse


def test_one_large_channel_does_not_spoil_the_others():
    """What the transform is for: an outlier is shared out over all values instead of stretching a scale."""
    x = randn(500, 64)
    x[:, 5] *= 30
    error = (Higgs(4, 64).decode(*Higgs(4, 64).encode(x)) - x).square().mean(-1) / x.square().mean(-1)
    assert error.mean() < 0.012


def test_equally_near_vectors_give_the_lower_code(device: str):
    grid = grid_of(2).clone()
    grid[9], grid[200] = grid[5], grid[5]
    x = randn(300, 64)
    codes, scale = torch.empty(300, 16, dtype=torch.uint8), torch.empty(300, dtype=torch.float16)
    codes, scale = codes.to(device), scale.to(device)
    ops.higgs_encode(codes, scale, x.to(device), grid.to(device))
    assert (codes == 5).any() and not (codes == 9).any() and not (codes == 200).any()
    ops.higgs_encode(codes, scale, x.to(device), grid[:1].expand(256, 4).contiguous().to(device))
    assert not codes.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_zero_rows(device: str, bits: Bits, dtype: torch.dtype):
    higgs = Higgs(bits, 48)
    x = randn(5, 48).to(device, dtype)
    x[[0, 3]] = 0
    x[4] = 1e-9 if dtype != torch.float16 else 0  # a norm below the smallest float16
    codes, scale = higgs.encode(x)
    assert torch.equal(codes.cpu(), encode(x.cpu(), grid_of(bits), higgs.group)[0])
    assert scale[[0, 3, 4]].tolist() == [0, 0, 0] and (scale[[1, 2]] > 0).all()
    back = higgs.decode(codes, scale, dtype)
    assert not back[[0, 3, 4]].any() and back[[1, 2]].any(-1).all()


@pytest.mark.parametrize("odd", [NAN, INF, -INF])
@pytest.mark.parametrize("bits", BITS)
def test_a_row_that_holds_no_number_is_nan_and_alone(device: str, bits: Bits, odd: float):
    higgs = Higgs(bits, 64)
    x = randn(40, 64).to(device)
    clean_codes, clean_scale = higgs.encode(x)
    x[17, 3] = odd
    codes, scale = higgs.encode(x)
    rest = [i for i in range(40) if i != 17]
    assert torch.equal(codes[rest], clean_codes[rest]) and torch.equal(scale[rest], clean_scale[rest])
    assert scale[17].isnan() and not codes[17].any()
    back = higgs.decode(codes, scale)
    assert back[17].isnan().all() and back[rest].isfinite().all()
    scores = higgs.scores(higgs.lut(randn(1, 64).to(device)), codes, scale)
    assert scores[0, 17].isnan() and scores[0, rest].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_rows_stay_finite(device: str, dtype: torch.dtype):
    """A norm beyond float16 is cut to 65504, and a float16 result to the largest number."""
    x = torch.zeros(3, 32)
    x[0, 1], x[1], x[2, 4] = 65504.0, 3e4, -65000.0
    higgs = Higgs(4, 32)
    codes, scale = higgs.encode(x.to(device, dtype))
    assert scale.isfinite().all() and scale[1] == 65504
    back = higgs.decode(codes, scale, dtype).float().cpu()
    assert back.isfinite().all()
    assert torch.nn.functional.cosine_similarity(back, x).min() > 0.97
    huge = torch.full((1, 32), 3e38, dtype=torch.float32, device=device)
    assert higgs.decode(*higgs.encode(huge)).isfinite().all()


def test_strided_inputs(device: str):
    """As a chunk's K and V lie: heads before tokens, and a slice of a wider row."""
    higgs = Higgs(2, 32)
    x = randn(6, 5, 64).to(device)
    for view in (x[..., 32:], x.transpose(0, 1)[..., :32], x[..., ::2], x[:, :1, :32].expand(6, 5, 32)):
        codes, scale = higgs.encode(view)
        expected = higgs.encode(view.contiguous())
        assert torch.equal(codes, expected[0]) and torch.equal(scale, expected[1])
        back = higgs.decode(codes.transpose(0, 1), scale.T)
        assert torch.equal(back, higgs.decode(*expected).transpose(0, 1))


def test_writes_what_it_should_and_nothing_else(device: str):
    """Into poisoned rows, between guards."""
    x = randn(7, 64).to(device)
    grid = load_grid(4, x.device)
    codes = torch.full((9, 32), 255, dtype=torch.uint8, device=device)
    scale = torch.full((9,), NAN, dtype=torch.float16, device=device)
    wide = torch.full((9, 2 * 48), NAN, device=device)
    ops.higgs_encode(codes[1:8], scale[1:8], x[:, :48], grid)
    ops.higgs_decode(wide[1:8, 48:], codes[1:8], scale[1:8], grid)
    assert (codes[[0, 8]] == 255).all() and scale[[0, 8]].isnan().all()
    assert wide[[0, 8]].isnan().all() and wide[:, :48].isnan().all()
    assert (wide[1:8, 48:].cpu() - x[:, :48].cpu()).square().mean() < 0.01


# ---------------------------------------------------------------------------------------------------- scores


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    "lead, queries, tokens, dim",
    [((), 1, 1, 64), ((2,), 3, 700, 64), ((2, 2), 2, 33, 80), ((3,), 5, 9, 16), ((1,), 1, 4100, 256)],
    ids=str,
)
def test_scores_are_decode_then_dot(device: str, lead, queries: int, tokens: int, dim: int, bits: Bits):
    higgs = Higgs(bits, dim)
    query, keys = randn(*lead, queries, dim, seed=1), randn(*lead, tokens, dim, seed=2)
    codes, scale = higgs.encode(keys.to(device))
    lut = higgs.lut(query.to(device))
    assert lut.shape == (*lead, queries, higgs.pieces, 256) and lut.dtype == torch.float32
    found = higgs.scores(lut, codes, scale).cpu()
    assert found.shape == (*lead, queries, tokens) and found.dtype == torch.float32
    decoded = higgs.decode(codes, scale).double().cpu()
    expected = query.double() @ decoded.transpose(-1, -2)
    norms = query.double().norm(dim=-1)[..., None] * decoded.norm(dim=-1)[..., None, :]
    assert ((found - expected).abs() <= 1e-5 * norms).all()


@settings(max_examples=40, deadline=None)
@given(
    heads=st.integers(0, 3),
    queries=st.integers(0, 4),
    tokens=st.integers(0, 40),
    dim=st.integers(1, 256),
    bits=st.sampled_from(BITS),
)
def test_scores_of_any_shape(heads: int, queries: int, tokens: int, dim: int, bits: Bits):
    higgs = Higgs(bits, dim)
    query, keys = randn(heads, queries, dim, seed=1), randn(heads, tokens, dim, seed=2)
    codes, scale = higgs.encode(keys)
    expected = query.double() @ higgs.decode(codes, scale).double().transpose(-1, -2)
    found = higgs.scores(higgs.lut(query), codes, scale)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5 * dim)


def test_scores_of_strided_codes(device: str):
    """Landmarks may lie token by token, all heads together."""
    higgs = Higgs(2, 64)
    keys, query = randn(50, 3, 64).to(device), randn(3, 2, 64, seed=1).to(device)
    codes, scale = higgs.encode(keys)  # [tokens, heads, ...]
    lut = higgs.lut(query)
    found = higgs.scores(lut, codes.transpose(0, 1), scale.T)
    assert torch.equal(found, higgs.scores(lut, codes.transpose(0, 1).contiguous(), scale.T.contiguous()))
    out = torch.full((5, 2, 50), NAN, device=device)
    ops.higgs_scores(out[1:4], lut, codes.transpose(0, 1), scale.T)
    assert torch.equal(out[1:4], found) and out[[0, 4]].isnan().all()


def top(scores: torch.Tensor, share: float) -> torch.Tensor:
    best = scores.topk(int(share * scores.shape[-1])).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)


def test_more_bits_find_more_of_the_top_keys():
    query, keys = randn(64, 64, seed=1), randn(2000, 64, seed=2)
    truth = top(query @ keys.T, 0.03)
    recall = {}
    for bits in BITS:
        higgs = Higgs(bits, 64)
        found = top(higgs.scores(higgs.lut(query), *higgs.encode(keys)), 0.03)
        recall[bits] = ((found & truth).sum() / truth.sum()).item()
    assert 0.3 < recall[1] < recall[2] - 0.1 and recall[2] < recall[4] - 0.1 and recall[4] > 0.85


# -------------------------------------------------------------------------------------- refusals and schemas


def test_refusals():
    with pytest.raises(ValueError, match="not for 3"):
        Higgs(3, 64)  # type: ignore[arg-type]
    for dim in (0, 257):
        with pytest.raises(ValueError, match=f"not of {dim}"):
            Higgs(4, dim)
    with pytest.raises(ValueError, match="x ends in 63"):
        Higgs(4, 64).encode(torch.zeros(2, 63))
    with pytest.raises(ValueError, match="codes ends in 16"):
        Higgs(4, 64).decode(torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2).half())
    with pytest.raises(RuntimeError, match="got Double"):
        Higgs(4, 64).encode(torch.zeros(2, 64).double())


def encode_arguments() -> dict[str, torch.Tensor]:
    codes, scale = torch.zeros(5, 16, dtype=torch.uint8), torch.zeros(5, dtype=torch.float16)
    return {"codes": codes, "scale": scale, "x": torch.zeros(5, 64), "grid": grid_of(2)}


def scores_arguments() -> dict[str, torch.Tensor]:
    codes, scale = torch.zeros(2, 9, 16, dtype=torch.uint8), torch.zeros(2, 9, dtype=torch.float16)
    return {"out": torch.zeros(2, 3, 9), "lut": torch.zeros(2, 3, 16, 256), "codes": codes, "scale": scale}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"codes": torch.zeros(4, 16, dtype=torch.uint8)}, "codes must be"),
        ({"codes": torch.zeros(5, 16, dtype=torch.int8)}, "codes must be"),
        ({"codes": torch.zeros(5, 32, dtype=torch.uint8)[:, ::2]}, "codes must be"),
        ({"codes": torch.zeros(5, 15, dtype=torch.uint8)}, "15 codes of 4 values"),
        ({"codes": torch.zeros(5, 2, dtype=torch.uint8), "x": torch.zeros(5, 8)}, "hold 8"),
        ({"codes": torch.zeros(5, 128, dtype=torch.uint8)}, "hold 512"),
        ({"x": torch.zeros(5, 65)}, "rows of 65"),
        ({"x": torch.zeros(5, 128)[:, ::2]}, "last dimension"),
        ({"scale": torch.zeros(5)}, "scale must be"),
        ({"scale": torch.zeros(6).half()}, "scale must be"),
        ({"grid": grid_of(2).float()}, "grid must be"),
        ({"grid": grid_of(2)[:128]}, "grid must be"),
        ({"grid": torch.zeros(256, 3).half()}, "grid must be"),
    ],
    ids=str,
)
def test_ops_refuse_rows(change: dict[str, torch.Tensor], message: str):
    arguments = encode_arguments() | change
    with pytest.raises(RuntimeError, match=message):
        ops.higgs_encode(**arguments)
    x = arguments.pop("x")
    with pytest.raises(RuntimeError, match=message):
        ops.higgs_decode(x, **arguments)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"out": torch.zeros(2, 3, 8)}, "out must be"),
        ({"out": torch.zeros(2, 9, 3).transpose(1, 2)}, "out must be"),
        ({"lut": torch.zeros(2, 3, 16, 128)}, "lut must be"),
        ({"lut": torch.zeros(2, 3, 15, 256)}, "codes must be"),
        ({"codes": torch.zeros(2, 9, 16, dtype=torch.int64)}, "codes must be"),
        ({"scale": torch.zeros(2, 9)}, "scale must be"),
    ],
    ids=str,
)
def test_scores_refuse(change: dict[str, torch.Tensor], message: str):
    with pytest.raises(RuntimeError, match=message):
        ops.higgs_scores(**scores_arguments() | change)


@pytest.mark.parametrize("op", ["higgs_encode", "higgs_decode", "higgs_scores"])
def test_schema_and_fake(op: str):
    """The op changes what its schema says and nothing else, and runs under fake tensors."""
    ops.load_library()
    encoding, scoring = encode_arguments(), scores_arguments()
    encoding["x"] = randn(5, 64)
    arguments = {
        "higgs_encode": tuple(encoding.values()),
        "higgs_decode": (encoding["x"], encoding["codes"], encoding["scale"], encoding["grid"]),
        "higgs_scores": tuple(scoring.values()),
    }[op]
    target = getattr(torch.ops.vllm_kvplug, op).default
    torch.library.opcheck(target, arguments, test_utils=("test_schema", "test_faketensor"))


# ------------------------------------------------------------------------------------------ keys in pages


@pytest.mark.parametrize("dim, page_tokens, count", [(16, 8, 3), (64, 40, 1), (128, 240, 17), (256, 120, 5)])
def test_scores_of_keys_in_pages(dim: int, page_tokens: int, count: int, device: str) -> None:
    """As of keys in one piece. A NaN scale concerns its key alone; pages of others are not read."""
    rows, heads, group, higgs = 2, 3, 2, Higgs(2, dim)
    keys, query = randn(rows, heads, count * page_tokens, dim), randn(rows, heads, group, dim, seed=1)
    keys[1, 2, 5] = NAN
    codes, scale = higgs.encode(keys)
    lut = higgs.lut(query)
    expected = higgs.scores(lut, codes, scale)
    split = (rows, heads, count, page_tokens)
    content = codes.view(*split, -1).flatten(-2), scale.view(split).contiguous().view(torch.uint8)
    order = torch.randperm(rows * heads * count + 3, generator=torch.Generator().manual_seed(2))[3:]
    pages = torch.full((len(order) + 3, page_tokens * (higgs.pieces + 2) + 4), 255, dtype=torch.uint8)
    pages[order, :-4] = torch.cat(content, -1).flatten(0, 2)
    out = torch.full((rows, heads, group, count * page_tokens), NAN, device=device)
    page = order.view(rows, heads, count).to(device)
    ops.landmark_scores(out, lut.to(device), pages.to(device), page, page_tokens)
    assert torch.allclose(out.cpu(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert out[1, 2, :, 5].isnan().all() and int(out.isnan().sum()) == group


def test_wrong_pages() -> None:
    lut, page = torch.zeros(1, 1, 1, 4, 256), torch.zeros(1, 1, 2, dtype=torch.int64)
    pages, out = torch.zeros(3, 48, dtype=torch.uint8), torch.zeros(1, 1, 1, 16)
    ops.landmark_scores(out, lut, pages, page, 8)
    with pytest.raises(RuntimeError, match="room for 10 keys"):
        ops.landmark_scores(torch.zeros(1, 1, 1, 20), lut, pages, page, 10)
    with pytest.raises(RuntimeError, match="out must be"):
        ops.landmark_scores(out[..., :8], lut, pages, page, 8)
    with pytest.raises(RuntimeError, match="page must be"):
        ops.landmark_scores(out, lut, pages, page.int(), 8)
    with pytest.raises(IndexError, match="page 3 is outside a pool of 3"):
        ops.landmark_scores(out, lut, pages, page + 3, 8)
