"""The custom ops against plain float32 torch.

Every case runs on the CPU (C++) and, where there is a GPU, on CUDA: in CUDA C++, but for attention in float32, for odd
head sizes and on other GPUs than Hopper, which is a Triton kernel. With TRITON_INTERPRET=1 that kernel runs on CPU
tensors instead: `test_triton_kernel_interpreted` does that in a process of its own, since Triton reads the variable
when it is imported.
"""

from dataclasses import dataclass

import pytest
import torch
from kernel_tools import INTERPRETED, run_interpreted, runs_kernel, starts_interpreter

from vllm_kvplug import ops

PAGE = 16
CHUNK = 64
NAN, INF = float("nan"), float("inf")
# Kernels accumulate in float32 and round once, to the dtype of `out`.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def device(request):
    return request.param


def check_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Equal where not finite, close elsewhere, and not off in direction."""
    actual, expected = actual.float().cpu(), expected.float().cpu()
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    a, b = actual.nan_to_num().double().flatten(), expected.nan_to_num().double().flatten()
    norms = (a * a + b * b).sum()
    assert norms == 0 or 1 - 2 * (a * b).sum() / norms < 5e-6


# ---------------------------------------------------------------------------------------------- kv_write


def make_kv(tokens, heads, dim, dtype, device, strided):
    """Key and value, contiguous or as they lie in a fused qkv projection of heads + 2 query heads."""
    if not strided:
        return (torch.randn(tokens, heads, dim, device=device).to(dtype) for _ in range(2))
    query_heads = heads + 2
    qkv = torch.randn(tokens, (query_heads + 2 * heads) * dim, device=device).to(dtype)
    _, key, value = qkv.split([query_heads * dim, heads * dim, heads * dim], dim=-1)
    return key.view(tokens, heads, dim), value.view(tokens, heads, dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(
    "tokens, heads, dim", [(0, 2, 64), (1, 1, 64), (7, 3, 64), (33, 2, 80), (19, 5, 7), (300, 4, 128)]
)
def test_kv_write(device, dtype, strided, tokens, heads, dim):
    torch.manual_seed(0)
    pages = tokens * heads // PAGE + 2
    key, value = make_kv(tokens, heads, dim, dtype, device, strided)
    dest = torch.randperm(pages * PAGE, device=device)[: tokens * heads].view(tokens, heads)
    dest[torch.rand(tokens, heads, device=device) < 0.3] = -1
    pool = torch.full((pages, PAGE, 2 * dim), NAN, dtype=dtype, device=device)

    ops.kv_write(pool, key, value, dest)

    expected = torch.full_like(pool, NAN).view(-1, 2 * dim)
    for token in range(tokens):
        for head in range(heads):
            if dest[token, head] >= 0:
                expected[dest[token, head]] = torch.cat([key[token, head], value[token, head]])
    # Bitwise, so that the poison counts: a slot that no destination names must not change.
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    assert torch.equal(pool.view(-1, 2 * dim).view(bits), expected.view(bits))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens, heads, dim", [(7, 3, 64), (19, 5, 7), (40, 4, 128)])
def test_kv_write_in_e4m3(device, dtype, tokens, heads, dim):
    """Rounded to nearest even; what exceeds the largest finite number becomes that, NaN stays NaN."""
    torch.manual_seed(0)
    key, value = make_kv(tokens, heads, dim, dtype, device, strided=True)
    key[0, 0, :6] = torch.tensor([NAN, INF, -INF, 1000.0, 2.0**-10, -0.0])
    dest = torch.randperm(tokens * heads, device=device).view(tokens, heads)
    dest[-1, 0] = -1
    pool = torch.full((tokens * heads // PAGE + 1, PAGE, 2 * dim), 1.0, device=device).to(torch.float8_e4m3fn)

    ops.kv_write(pool, key, value, dest)

    expected = torch.ones_like(pool, dtype=torch.float32).view(-1, 2 * dim)
    for token in range(tokens):
        for head in range(heads):
            if dest[token, head] >= 0:
                row = torch.cat([key[token, head], value[token, head]]).float().clamp(-448, 448)
                expected[dest[token, head]] = row.to(torch.float8_e4m3fn).float()
    assert torch.equal(pool.float().view(-1, 2 * dim).nan_to_num(7.0), expected.nan_to_num(7.0))
    assert pool.float().isnan().sum() == 1


def test_kv_write_strided_dest(device):
    key, value = (torch.randn(6, 2, 64, device=device) for _ in range(2))
    dest = torch.arange(12, device=device).view(2, 6).T  # head-major
    pool = torch.zeros(1, PAGE, 128, device=device)
    ops.kv_write(pool, key, value, dest)
    assert torch.equal(pool[0, :12, :64], key.transpose(0, 1).reshape(12, 64))
    assert torch.equal(pool[0, :12, 64:], value.transpose(0, 1).reshape(12, 64))
    assert not pool[0, 12:].any()


def test_kv_write_all_skipped(device):
    pool = torch.zeros(2, PAGE, 128, device=device)
    poison = torch.full((5, 3, 64), NAN, device=device)
    ops.kv_write(pool, poison, poison, torch.full((5, 3), -1, device=device))
    assert not pool.any()


def test_kv_write_rejects():
    pool, kv = torch.zeros(2, PAGE, 128), torch.zeros(1, 1, 64)
    dest = torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(IndexError, match="token slot 32"):
        ops.kv_write(pool, kv, kv, dest + 32)
    with pytest.raises(IndexError, match="token slot -2"):
        ops.kv_write(pool, kv, kv, dest - 2)
    with pytest.raises(RuntimeError, match="int64"):
        ops.kv_write(pool, kv, kv, dest.int())
    with pytest.raises(RuntimeError, match="one dtype"):
        ops.kv_write(pool, kv.half(), kv.half(), dest)
    with pytest.raises(RuntimeError, match="pool must be"):
        ops.kv_write(pool[:, :, :96], kv, kv, dest)
    with pytest.raises(RuntimeError, match="last dimension"):
        ops.kv_write(pool, torch.zeros(1, 1, 128)[..., ::2], kv, dest)


# -------------------------------------------------------------------------------------- decode_attention


@dataclass(frozen=True)
class Case:
    lengths: tuple  # per request slot and KV head, of one layer
    row_slot: tuple
    group: int = 3
    dim: int = 64
    layers: int = 2  # the layer under test is the last one

    def __str__(self):
        return f"R{len(self.row_slot)}-H{len(self.lengths[0])}-G{self.group}-D{self.dim}"


CORRECTNESS = [
    Case(lengths=((40, 16),), row_slot=(0,)),
    Case(lengths=((5, 33, 17), (64, 15, 100)), row_slot=(1, 0), layers=3),
    Case(lengths=((37,), (4,)), row_slot=(0, 1), group=1, dim=128),
    Case(lengths=((70, 31),), row_slot=(0,), group=8, dim=256),
    Case(lengths=((50, 90),), row_slot=(0,), group=4, dim=128),
]
CORNER = [
    Case(lengths=((0, 1), (1, 0)), row_slot=(0, 1)),
    Case(lengths=((20, 9), (3, 2)), row_slot=(-1, 1, -1, 0, -1)),
    Case(lengths=((8, 8),), row_slot=(-1, -1)),
    Case(lengths=((8, 8),), row_slot=()),
    Case(lengths=((7,), (9,), (11,)), row_slot=(2, 2, 0), group=5),
    Case(lengths=((1023, 1024, 1025),), row_slot=(0,), group=2),
    Case(lengths=((2100, 0), (1, 1300)), row_slot=(1, 0, -1), group=7),
]


class Inputs:
    """Random stored tokens on shuffled pages. Whatever no token references is NaN or inf."""

    def __init__(self, case: Case, dtype: torch.dtype, device: str, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        slots, heads = len(case.lengths), len(case.lengths[0])
        total_heads = case.layers * heads
        self.first_head, self.num_kv_heads = total_heads - heads, heads
        self.scale = case.dim**-0.5

        lengths = torch.randint(0, 30, (slots, total_heads), generator=generator)
        lengths[:, self.first_head :] = torch.tensor(case.lengths)
        width = -(-int(lengths.max()) // (PAGE * CHUNK)) + 1
        pages_of = -(-lengths // PAGE)
        chunks_of = -(-pages_of // CHUNK)
        pages, chunks = int(pages_of.sum()) + 3, int(chunks_of.sum()) + 2
        free_pages = torch.randperm(pages, generator=generator).tolist()
        free_chunks = torch.randperm(chunks, generator=generator).tolist()

        # Entries behind the end of a head point to a real page or chunk: following them must not matter.
        self.directory = torch.full((slots, total_heads, width), free_chunks.pop(), dtype=torch.int32)
        self.chunks = torch.full((chunks, CHUNK), free_pages.pop(), dtype=torch.int32)
        self.pool = torch.full((pages, PAGE, 2 * case.dim), NAN)
        self.pool[::2] = INF
        self.keys, self.values = {}, {}
        for slot in range(slots):
            for head in range(total_heads):
                length = int(lengths[slot, head])
                kv = torch.randn(length, 2 * case.dim, generator=generator).to(dtype)
                self.keys[slot, head], self.values[slot, head] = kv.float().split(case.dim, dim=-1)
                for page in range(int(pages_of[slot, head])):
                    if page % CHUNK == 0:
                        chunk = free_chunks.pop()
                        self.directory[slot, head, page // CHUNK] = chunk
                    page_id = free_pages.pop()
                    self.chunks[chunk, page % CHUNK] = page_id
                    rows = kv[page * PAGE : (page + 1) * PAGE]
                    self.pool[page_id, : len(rows)] = rows.float()

        rows, query_heads = len(case.row_slot), heads * case.group
        # A slice of a wider tensor, as the query lies in a fused qkv projection.
        wide = torch.randn(rows, query_heads + 2, case.dim, generator=generator)
        self.query = wide.to(device, dtype)[:, :query_heads]
        self.out = torch.full((rows, query_heads, case.dim), NAN, dtype=dtype, device=device)
        self.row_slot = torch.tensor(case.row_slot, dtype=torch.int32, device=device)
        self.lengths = lengths.to(device, torch.int32)
        self.directory, self.chunks = self.directory.to(device), self.chunks.to(device)
        self.pool = self.pool.to(device, dtype)

    def arguments(self):
        tables = (self.directory, self.chunks, self.row_slot, self.lengths)
        return self.out, self.query, self.pool, *tables, self.first_head, self.num_kv_heads, self.scale

    def run(self, plan=None) -> torch.Tensor:
        if INTERPRETED:
            *tables, _, scale = self.arguments()
            (plan or self.triton_plan()).attend(*tables, scale)
        else:
            ops.decode_attention(*self.arguments(), plan)
        return self.out

    def triton_plan(self):
        from vllm_kvplug.kernels.decode_attention import DecodePlan

        rows, query_heads, dim = self.query.shape
        layers = self.lengths.shape[1] // self.num_kv_heads
        plan = DecodePlan(max(rows, 1), layers, self.num_kv_heads, query_heads, dim, self.query.device)
        if rows:
            plan.update(self.row_slot, self.lengths)
        return plan

    def reference(self) -> torch.Tensor:
        query = self.query.float().cpu()
        group = query.shape[1] // self.num_kv_heads
        expected = torch.zeros_like(query)
        for row, slot in enumerate(self.row_slot.tolist()):
            for q in range(query.shape[1]):
                head = self.first_head + q // group
                if slot >= 0 and len(self.keys[slot, head]):
                    scores = self.keys[slot, head] @ query[row, q] * self.scale  # [n]
                    expected[row, q] = torch.softmax(scores, 0) @ self.values[slot, head]
        return expected


def check_case(case, dtype, device):
    inputs = Inputs(case, dtype, device)
    # First the kernel: the reference's freed buffers could otherwise hand it the right answer.
    actual = inputs.run().clone()
    check_close(actual, inputs.reference(), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CORRECTNESS + CORNER, ids=str)
def test_decode_attention(device, case, dtype):
    check_case(case, dtype, device)


def test_decode_attention_large_scores(device):
    """Scores far apart: the online softmax rescales by factors that underflow."""
    inputs = Inputs(Case(lengths=((300, 45),), row_slot=(0,)), torch.float32, device)
    inputs.scale = 40.0
    # Summing 64 products in another order moves a score of some hundreds by 1e-4.
    torch.testing.assert_close(inputs.run().cpu(), inputs.reference(), rtol=1e-3, atol=1e-3)


def test_decode_attention_nan_in_stored_token(device):
    """A NaN that a head did store is not hidden, and stays with the queries of that head."""
    inputs = Inputs(Case(lengths=((20, 20),), row_slot=(0,), layers=1), torch.float32, device)
    page = inputs.chunks[inputs.directory[0, 0, 0], 1]
    inputs.pool[page, 2, 0] = NAN
    out = inputs.run()
    assert out[0, :3].isnan().all() and out[0, 3:].isfinite().all()


def test_decode_attention_strided_out(device):
    inputs = Inputs(CORRECTNESS[1], torch.float32, device)
    wide = torch.full((*inputs.out.shape[:2], 2 * 64), NAN, device=device)
    inputs.out = wide[..., 64:]
    check_close(inputs.run(), inputs.reference(), torch.float32)
    assert wide[..., :64].isnan().all()


def test_decode_attention_rejects():
    inputs = Inputs(CORRECTNESS[0], torch.float32, "cpu")
    inputs.lengths[0, inputs.first_head] = 10**6
    with pytest.raises(IndexError, match="1000000 tokens"):
        inputs.run()
    inputs = Inputs(CORRECTNESS[0], torch.float32, "cpu")
    inputs.chunks.fill_(-1)
    with pytest.raises(IndexError, match="page -1"):
        inputs.run()
    inputs = Inputs(CORRECTNESS[0], torch.float32, "cpu")
    inputs.row_slot.fill_(1)
    with pytest.raises(IndexError, match="request slot 1"):
        inputs.run()
    inputs = Inputs(CORRECTNESS[0], torch.float32, "cpu")
    inputs.num_kv_heads = 4
    with pytest.raises(RuntimeError, match="do not divide"):
        inputs.run()
    inputs = Inputs(CORRECTNESS[0], torch.float64, "cpu")
    with pytest.raises(RuntimeError, match="dtype must be"):
        inputs.run()


@runs_kernel
@pytest.mark.parametrize("capacity", [1, 3, 8])
def test_one_plan_for_all_layers(device, capacity):
    """The same rows in every layer, whatever number of splits the lengths are cut into, and after they change."""
    if device == "cpu" and not INTERPRETED:
        pytest.skip("plans are for the Triton kernel")
    from vllm_kvplug.kernels.decode_attention import DecodePlan

    inputs = Inputs(
        Case(lengths=((700, 3), (0, 260), (129, 128)), row_slot=(2, -1, 0, 1), layers=3), torch.float32, device
    )
    plan = DecodePlan(6, 3, 2, 6, 64, inputs.query.device)
    plan.capacity = capacity
    plan.partial.fill_(NAN)
    plan.sums.fill_(NAN)
    for lengths in (inputs.lengths // 2, inputs.lengths):
        plan.update(inputs.row_slot, lengths.contiguous())
    check_plan(plan, inputs, capacity)
    for layer in range(3):
        inputs.first_head = 2 * layer
        inputs.out.fill_(NAN)
        check_close(inputs.run(plan), inputs.reference(), torch.float32)


def check_plan(plan, inputs, capacity):
    """Every token of every head is in one split, splits of a layer are as long as each other, and not too many."""
    for layer in range(3):
        size = 1 << int(plan.split_log2[layer])
        lengths = [int(inputs.lengths[s, 2 * layer + h]) if s >= 0 else 0 for s in inputs.row_slot for h in range(2)]
        counts = [-(-length // size) for length in lengths]
        expected = [item for item, count in enumerate(counts) for _ in range(count)]
        work = plan.work[layer].tolist()
        assert work[: len(expected)] == expected and set(work[len(expected) :]) <= {-1}
        assert sum(length // size for length in lengths) <= capacity
        assert size == 128 or sum(lengths) > capacity * size // 2, "splits could be shorter"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CORRECTNESS + CORNER, ids=str)
def test_decode_attention_over_e4m3(device, case, dtype):
    inputs = Inputs(case, torch.float8_e4m3fn, device)
    inputs.query, inputs.out = inputs.query.to(dtype), inputs.out.to(dtype)
    check_close(inputs.run().clone(), inputs.reference(), dtype)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CORRECTNESS + CORNER[:2], ids=str)
def test_triton_kernel_in_reduced_precision(case, dtype):
    """What GPUs other than Hopper run."""
    inputs = Inputs(case, dtype, "cuda")
    check_close(inputs.run(inputs.triton_plan()), inputs.reference(), dtype)


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)


@needs_hopper
@pytest.mark.parametrize("blocks", [1, 3, 40, None])
@pytest.mark.parametrize("dim, group", [(64, 8), (64, 1), (128, 4), (128, 5), (256, 8), (128, 1)])
def test_hopper_plan(blocks, dim, group):
    """The same rows in every layer, whatever number of blocks share them, and after they change."""
    from vllm_kvplug.kernels.hopper import HopperPlan

    lengths = ((700, 3), (0, 4060), (129, 128), (16, 17))
    case = Case(lengths=lengths, row_slot=(2, -1, 0, 3, 1), group=group, dim=dim, layers=3)
    inputs = Inputs(case, torch.bfloat16, "cuda")
    plan = HopperPlan(6, 3, 2, 2 * group, dim, inputs.query.device, blocks)
    plan.partial.fill_(NAN)
    plan.sums.fill_(NAN)
    for lengths in (inputs.lengths // 2, inputs.lengths):
        plan.update(inputs.row_slot, lengths.contiguous())
    check_parts(plan, inputs)
    for layer in (0, 1, 2, 2):
        inputs.first_head = 2 * layer
        inputs.out.fill_(NAN)
        check_close(inputs.run(plan), inputs.reference(), torch.bfloat16)
        assert not plan.arrived.any()


def check_parts(plan, inputs):
    """Every page of every head is in one part, and parts are equally long but for the last."""
    for layer in range(3):
        pages = [
            -(-int(inputs.lengths[s, 2 * layer + h]) // 16) if s >= 0 else 0 for s in inputs.row_slot for h in (0, 1)
        ]
        line = [(item, page) for item, count in enumerate(pages) for page in range(count)]
        found = []
        for item, first, count, share, *_ in plan.parts[layer].tolist():
            assert count in (0, share) or len(found) + count == len(line)
            assert count == 0 or line[len(found)] == (item, first)
            found += line[len(found) : len(found) + count]
        assert found == line


@needs_hopper
@pytest.mark.parametrize("dim, group", [(64, 3), (128, 4), (256, 8)])
def test_hopper_e4m3_pages(dim, group):
    """Pages of e4m3 numbers with a scale for the K and the V of every head."""
    from vllm_kvplug.kernels.hopper import HopperPlan

    case = Case(lengths=((700, 3, 0), (0, 4060, 33)), row_slot=(1, -1, 0), group=group, dim=dim)
    inputs = Inputs(case, torch.float8_e4m3fn, "cuda")
    inputs.query, inputs.out = inputs.query.bfloat16(), inputs.out.bfloat16()
    scales = torch.rand(2, 3, device="cuda") + 0.5
    plan = HopperPlan(3, 2, 3, 3 * group, dim, inputs.query.device)
    plan.update(inputs.row_slot, inputs.lengths)
    tables = inputs.arguments()[:-3]
    plan.attend(*tables, inputs.first_head, inputs.scale, scales)
    for (_, head), stored in [*inputs.keys.items()]:
        stored *= float(scales[0, head % 3])
    for (_, head), stored in [*inputs.values.items()]:
        stored *= float(scales[1, head % 3])
    check_close(inputs.out, inputs.reference(), torch.bfloat16)


# ------------------------------------------------------------------------------------- both ops together


def test_write_then_attend(device):
    """Tokens stored one step at a time are what a query then sees."""
    torch.manual_seed(0)
    heads, dim, tokens = 2, 64, 35
    key, value = (torch.randn(tokens, heads, dim, device=device) for _ in range(2))
    pages = torch.randperm(8)[: 3 * heads].view(heads, 3)
    chunks = torch.zeros(heads, CHUNK, dtype=torch.int32)
    chunks[:, :3] = pages
    directory = torch.arange(heads, dtype=torch.int32).view(1, heads, 1)
    pool = torch.full((8, PAGE, 2 * dim), NAN, device=device)
    for token in range(tokens):
        dest = (pages[:, token // PAGE] * PAGE + token % PAGE).view(1, heads)
        ops.kv_write(pool, key[token : token + 1], value[token : token + 1], dest.to(device))
    query = torch.randn(1, 4, dim, device=device)
    out = torch.full_like(query, NAN)
    lengths = torch.full((1, heads), tokens, dtype=torch.int32)
    row_slot = torch.zeros(1, dtype=torch.int32)
    tables = (t.to(device) for t in (directory, chunks, row_slot, lengths))

    ops.decode_attention(out, query, pool, *tables, 0, heads, dim**-0.5)

    scores = torch.einsum("hgd,nhd->hgn", query[0].view(heads, 2, dim), key) * dim**-0.5
    expected = torch.einsum("hgn,nhd->hgd", scores.softmax(-1), value)
    check_close(out[0].view(heads, 2, dim), expected, torch.float32)


@pytest.mark.parametrize("op", ["kv_write", "decode_attention"])
def test_schema_and_fake(op):
    """The op changes what its schema says and nothing else, and runs under fake tensors."""
    ops.load_library()
    inputs = Inputs(CORRECTNESS[1], torch.float32, "cpu")
    inputs.pool.nan_to_num_(0.0, 0.0)
    inputs.out.zero_()
    kv = torch.randn(3, 2, 64)
    arguments = {
        "kv_write": (torch.zeros(1, PAGE, 128), kv, kv.clone(), torch.arange(6).view(3, 2)),
        "decode_attention": inputs.arguments(),
    }[op]
    target = getattr(torch.ops.vllm_kvplug, op).default
    torch.library.opcheck(target, arguments, test_utils=("test_schema", "test_faketensor"))


@needs_gpu
def test_cuda_graph_replay():
    """A captured graph follows new contents of every tensor: lengths, tables, rows, tokens."""
    shape = dict(group=4, dim=128)
    before = Inputs(Case(lengths=((900, 40), (8, 8)), row_slot=(0, -1), **shape), torch.bfloat16, "cuda")
    after = Inputs(Case(lengths=((3, 1200), (77, 0)), row_slot=(1, 0), **shape), torch.bfloat16, "cuda", 1)
    names = ("query", "pool", "directory", "chunks", "row_slot", "lengths")
    # One buffer for each argument, large enough for both states.
    for name in names:
        old, new = getattr(before, name), getattr(after, name)
        sizes = [max(a, b) for a, b in zip(old.shape, new.shape, strict=True)]
        buffer = old.new_zeros(sizes)
        buffer[tuple(slice(n) for n in old.shape)] = old
        setattr(before, name, buffer)
    key = torch.randn(2, 1, 128, dtype=torch.bfloat16, device="cuda")
    scratch = torch.zeros(1, PAGE, 256, dtype=torch.bfloat16, device="cuda")
    dest = torch.tensor([[3], [-1]], device="cuda")

    def step():
        ops.kv_write(scratch, key, key, dest)
        before.run()

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for name in names:
        new = getattr(after, name)
        getattr(before, name)[tuple(slice(n) for n in new.shape)] = new
    before.out.fill_(NAN)
    scratch.zero_()
    dest.copy_(torch.tensor([[-1], [5]]))
    graph.replay()
    torch.cuda.synchronize()

    check_close(before.out, after.reference(), torch.bfloat16)
    assert torch.equal(scratch[0, 5, :128], key[1, 0])
    assert scratch.view(PAGE, 256).any(-1).nonzero().flatten().tolist() == [5]


@starts_interpreter
def test_triton_kernel_interpreted():
    """The Triton kernel passes the decode cases on CPU tensors."""
    run_interpreted(
        __file__, "(test_decode_attention and float32 or strided_out or large_scores or nan_in or plan) and cpu"
    )
