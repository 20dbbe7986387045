"""K and V there and back: exactly, or with the error that fp8 or four bits allow."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_kvplug.quant.higgs import Higgs
from vllm_kvplug.tiers.codecs import Codec, CodecName, token_bytes

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DIMS = [1, 3, 7, 64]

E4M3 = [m * 2.0**-9 for m in range(8)] + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)][:-1]
"""The finite e4m3 numbers from 0 to 448, ascending; those with an even mantissa have even indices."""


def make(shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("lead", [(), (5,), (3, 4), (0,), (2, 0)], ids=str)
def test_auto_is_exact(dtype: torch.dtype, dim: int, lead: tuple[int, ...]):
    codec = Codec("auto", dim, dtype)
    key, value = make((*lead, dim), dtype, seed=1), make((*lead, dim), dtype, seed=2)
    rows = codec.encode(key, value)
    assert rows.dtype == torch.uint8 and rows.shape == (*lead, codec.token_bytes)
    assert codec.token_bytes == token_bytes("auto", dim, dtype.itemsize) == 2 * dim * dtype.itemsize
    decoded = codec.decode(rows)
    assert decoded.dtype == dtype and torch.equal(decoded, torch.cat([key, value], -1))


def test_auto_keeps_every_bit():
    key = torch.tensor([[torch.nan, torch.inf, -torch.inf, -0.0], [1e-45, 3.4e38, 1.0, 2.0]])
    found = Codec("auto", 4, torch.float32).decode(Codec("auto", 4, torch.float32).encode(key, -key))
    assert torch.equal(bits(found), bits(torch.cat([key, -key], -1)))


@pytest.mark.parametrize("name", ["auto", "fp8", "higgs4"])
def test_tokens_may_be_strided(name: str):
    """As a chunk's K and V are, [tokens, heads, d], and as rows of a larger buffer."""
    codec = Codec(name, 6, torch.float32)
    key, value = make((4, 3, 6), torch.float32, seed=1), make((4, 3, 6), torch.float32, seed=2)
    rows = codec.encode(key.transpose(0, 1), value.transpose(0, 1))
    for token in range(4):
        for head in range(3):
            assert torch.equal(rows[head, token], codec.encode(key[token, head], value[token, head]))
            assert torch.equal(codec.decode(rows[head, token]), codec.decode(rows)[head, token])


# ----------------------------------------------------------------------------------------------------- fp8


def nearest_code(x: float) -> float:
    """The e4m3 number nearest to x >= 0, ties to the even mantissa, no further than 448."""
    best = min(range(len(E4M3)), key=lambda i: (abs(E4M3[i] - x), i % 2))
    return E4M3[best]


def naive_fp8(token: list[float]) -> list[float]:
    """K or V of a token, there and back in plain float32: one float16 scale, one code for each value."""
    largest = max(abs(x) for x in token)
    scale = np.float32(np.float16(max(np.float32(largest) / np.float32(448), 2.0**-14)))
    return [float(np.copysign(np.float32(nearest_code(abs(np.float32(x) / scale))) * scale, x)) for x in token]


def test_the_e4m3_numbers():
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert codes.tolist() == E4M3


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 300.0, 1e5])
def test_fp8_is_the_plain_reference(dim: int, scale: float):
    codec = Codec("fp8", dim, torch.float32)
    key, value = make((9, dim), torch.float32, scale, seed=1), make((9, dim), torch.float32, scale, seed=2)
    key[0] = scale * 2.0 ** -torch.arange(dim)  # down to where codes have no full mantissa any more
    rows = codec.encode(key, value)
    assert rows.dtype == torch.uint8 and rows.shape == (9, codec.token_bytes)
    assert codec.token_bytes == token_bytes("fp8", dim, 4) == 2 * dim + 4
    expected = [naive_fp8(k) + naive_fp8(v) for k, v in zip(key.tolist(), value.tolist(), strict=True)]
    assert codec.decode(rows).tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e4])
def test_fp8_errors_are_small_beside_a_tokens_largest_value(dtype: torch.dtype, scale: float):
    """Three bits of mantissa: a sixteenth of each value. K's and V's scales are their own."""
    codec = Codec("fp8", 80, dtype)
    key, value = make((200, 80), dtype, scale, seed=1), make((200, 80), dtype, 0.01 * scale, seed=2)
    key[:, 0] *= 4
    both = torch.stack([key, value], 1).float()
    decoded = codec.decode(codec.encode(key, value))
    assert decoded.dtype == dtype
    error = (decoded.float().unflatten(-1, (2, 80)) - both).abs()
    largest = both.abs().amax(-1, keepdim=True)
    assert (error <= both.abs() / 16 * 1.1 + largest * 2**-10 + 2**-24).all()
    assert (error <= largest / 16).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["auto", "fp8"])
def test_zeros_stay_zeros(name: str, dtype: torch.dtype):
    codec = Codec(name, 5, dtype)
    zero, full = torch.zeros(2, 5, dtype=dtype), torch.full((2, 5), 448.0, dtype=dtype)
    assert codec.decode(codec.encode(zero, zero)).tolist() == [[0.0] * 10] * 2
    assert codec.decode(codec.encode(full, zero)).tolist() == [[448.0] * 5 + [0.0] * 5] * 2
    assert codec.decode(codec.encode(zero, -full)).tolist() == [[0.0] * 5 + [-448.0] * 5] * 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("largest", [65504.0, 65500.0, 60000.0, 448.0, 447.9, 0.1])
def test_the_largest_value_survives(dtype: torch.dtype, largest: float):
    """65504 is the largest float16: a scale that was rounded up must not make it infinite."""
    codec = Codec("fp8", 2, dtype)
    key = torch.tensor([[largest, -largest]]).to(dtype)
    decoded = codec.decode(codec.encode(key, key)).float()
    assert decoded.isfinite().all()
    torch.testing.assert_close(decoded, torch.cat([key, key], -1).float(), rtol=2**-8, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["fp8", "higgs4"])
def test_a_value_that_is_no_number_stays_in_its_token(name: CodecName, dtype: torch.dtype, odd: float):
    codec = Codec(name, 9, dtype)
    key, value = make((4, 9), dtype, seed=1), make((4, 9), dtype, seed=2)
    clean = codec.decode(codec.encode(key, value))
    broken = key.clone()
    broken[2, 3] = odd
    found = codec.decode(codec.encode(broken, value))
    assert torch.equal(found[[0, 1, 3]], clean[[0, 1, 3]])
    assert torch.equal(found[2, 9:], clean[2, 9:]), "V of a token whose K is broken"
    if name == "higgs4":
        assert found[2, :9].isnan().all()
    else:
        assert found[2, :9].isnan().any() == (odd != odd), "what was no number is not passed off as one"


# -------------------------------------------------------------------------------------------------- higgs4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim, size", [(16, 20), (64, 68), (128, 132), (256, 260), (80, 132), (3, 20)])
def test_higgs4_is_two_rows_of_the_quantiser(dim: int, size: int, dtype: torch.dtype):
    """A power of two takes half a byte a value; other heads take what the next power of two takes."""
    codec, higgs = Codec("higgs4", dim, dtype), Higgs(4, dim)
    key, value = make((3, 7, dim), dtype, 40.0, seed=1), make((3, 7, dim), dtype, 0.1, seed=2)
    rows = codec.encode(key, value)
    assert rows.dtype == torch.uint8 and rows.shape == (3, 7, size)
    assert codec.token_bytes == token_bytes("higgs4", dim, dtype.itemsize) == size
    expected = [higgs.decode(*higgs.encode(x), dtype) for x in (key, value)]
    decoded = codec.decode(rows)
    assert decoded.dtype == dtype and torch.equal(decoded, torch.cat(expected, -1))
    for found, x in zip(decoded.float().split(dim, -1), (key.float(), value.float()), strict=True):
        assert (found - x).square().sum() < 0.012 * x.square().sum()


@pytest.mark.parametrize("lead", [(), (0,), (2, 0)], ids=str)
def test_higgs4_of_few_tokens(lead: tuple[int, ...]):
    codec = Codec("higgs4", 64, torch.float32)
    rows = codec.encode(make((*lead, 64), torch.float32), make((*lead, 64), torch.float32))
    assert rows.shape == (*lead, 68) and codec.decode(rows).shape == (*lead, 128)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_higgs4_of_zeros(dtype: torch.dtype):
    codec = Codec("higgs4", 16, dtype)
    zero, key = torch.zeros(2, 16, dtype=dtype), make((2, 16), dtype)
    assert not codec.decode(codec.encode(zero, zero)).any()
    assert not codec.decode(codec.encode(key, zero))[:, 16:].any()
    assert codec.decode(codec.encode(key, zero))[:, :16].any()


def test_higgs4_refuses_long_heads():
    with pytest.raises(ValueError, match="not of 320"):
        token_bytes("higgs4", 320, 2)
