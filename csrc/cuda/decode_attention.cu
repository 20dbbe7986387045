#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "decode_attention_launch.cuh"

namespace kvplug {
namespace {

constexpr int kPartInts = sizeof(Part) / sizeof(int);

void check_tables(const at::Tensor& row_slot, const at::Tensor& lengths, const at::Tensor& starts,
                  const at::Tensor& parts, int64_t heads) {
  for (const at::Tensor& table : {row_slot, lengths, starts, parts}) {
    TORCH_CHECK(table.scalar_type() == at::kInt && table.device() == row_slot.device() &&
                    table.stride(table.dim() - 1) == 1,
                "decode_attention: tables must be int32, on one device and contiguous in their last dimension");
  }
  TORCH_CHECK(parts.dim() == 3 && parts.size(1) <= kMostBlocks && parts.size(2) == kPartInts && parts.is_contiguous() &&
                  starts.size(0) == parts.size(0) && starts.size(1) > row_slot.size(0) * heads &&
                  lengths.size(1) == parts.size(0) * heads,
              "decode_attention: the plan is for other rows, layers or heads");
}

void decode_plan(const at::Tensor& parts, const at::Tensor& starts, const at::Tensor& row_slot,
                 const at::Tensor& lengths, int64_t heads) {
  check_tables(row_slot, lengths, starts, parts, heads);
  const c10::cuda::CUDAGuard guard(parts.device());
  PlanArgs args;
  args.parts = reinterpret_cast<Part*>(parts.data_ptr<int>());
  args.starts = starts.data_ptr<int>();
  args.row_slot = row_slot.const_data_ptr<int>();
  args.lengths = lengths.const_data_ptr<int>();
  args.starts_stride = starts.stride(0);
  args.lengths_stride = lengths.stride(0);
  args.rows = static_cast<int>(row_slot.size(0));
  args.heads = static_cast<int>(heads);
  args.blocks = static_cast<int>(parts.size(1));
  C10_CUDA_CHECK(launch_decode_plan(args, static_cast<int>(parts.size(0)), c10::cuda::getCurrentCUDAStream()));
}

template <typename T, bool kFp8>
cudaError_t launch_for_size(int64_t dim, const DecodeArgs& args, const CUtensorMap& map, int blocks,
                            cudaStream_t stream) {
  switch (dim) {
    case 64:
      return launch_decode_attention<T, 64, kFp8>(args, map, blocks, stream);
    case 128:
      return launch_decode_attention<T, 128, kFp8>(args, map, blocks, stream);
    case 256:
      return launch_decode_attention<T, 256, kFp8>(args, map, blocks, stream);
    default:
      TORCH_CHECK(false, "decode_attention: head size must be 64, 128 or 256, got ", dim);
  }
}

void check_operands(const at::Tensor& out, const at::Tensor& query, const at::Tensor& pool, int64_t heads,
                    const std::optional<at::Tensor>& scales) {
  const int64_t dim = query.size(2), group = query.size(1) / heads;
  TORCH_CHECK(out.sizes() == query.sizes() && out.scalar_type() == query.scalar_type() && out.stride(2) == 1 &&
                  query.stride(2) == 1 && query.stride(0) % 2 == 0 && query.stride(1) % 2 == 0,
              "decode_attention: the last dimension of out and query must be contiguous, and both alike");
  TORCH_CHECK(query.scalar_type() == at::kBFloat16 || query.scalar_type() == at::kHalf,
              "decode_attention: dtype must be bfloat16 or float16, got ", query.scalar_type());
  TORCH_CHECK(group * heads == query.size(1) && group >= 1 && group <= kMostGroup,
              "decode_attention: 1 to ", kMostGroup, " query heads a KV head, got ", query.size(1), " for ", heads);
  TORCH_CHECK(pool.dim() == 3 && pool.size(1) == kPageTokens && pool.size(2) == 2 * dim && pool.is_contiguous(),
              "decode_attention: pool must be contiguous [P, ", kPageTokens, ", ", 2 * dim, "], got ", pool.sizes());
  TORCH_CHECK(pool.scalar_type() == query.scalar_type() || pool.scalar_type() == at::kFloat8_e4m3fn,
              "decode_attention: pool must be of the dtype of query or float8_e4m3fn, got ", pool.scalar_type());
  TORCH_CHECK(!scales || (pool.scalar_type() == at::kFloat8_e4m3fn && scales->scalar_type() == at::kFloat &&
                          scales->is_contiguous() && scales->numel() == 2 * heads),
              "decode_attention: a float8_e4m3fn pool, and no other, may have float32 scales [2, heads]");
}

void decode_attention_planned(const at::Tensor& out, const at::Tensor& query, const at::Tensor& pool,
                              const at::Tensor& directory, const at::Tensor& chunks, const at::Tensor& row_slot,
                              const at::Tensor& lengths, int64_t first_head, int64_t heads, double scale,
                              const at::Tensor& parts, const at::Tensor& starts, const at::Tensor& partial,
                              const at::Tensor& sums, const at::Tensor& arrived,
                              const std::optional<at::Tensor>& scales) {
  if (query.size(0) == 0) return;
  check_operands(out, query, pool, heads, scales);
  check_tables(row_slot, lengths, starts, parts, heads);
  const c10::cuda::CUDAGuard guard(pool.device());
  const int64_t layer = first_head / heads, dim = query.size(2);
  DecodeArgs args;
  args.out = out.data_ptr();
  args.query = query.const_data_ptr();
  args.directory = directory.const_data_ptr<int>();
  args.chunks = chunks.const_data_ptr<int>();
  args.row_slot = row_slot.const_data_ptr<int>();
  args.lengths = lengths.const_data_ptr<int>();
  args.parts = reinterpret_cast<const Part*>(parts.const_data_ptr<int>()) + layer * parts.size(1);
  args.starts = starts.const_data_ptr<int>() + layer * starts.stride(0);
  args.partial = partial.data_ptr<float>();
  args.sums = reinterpret_cast<float2*>(sums.data_ptr<float>());
  args.arrived = arrived.data_ptr<int>();
  args.scales = scales ? scales->const_data_ptr<float>() : nullptr;
  args.out_row = out.stride(0);
  args.out_head = out.stride(1);
  args.query_row = query.stride(0);
  args.query_head = query.stride(1);
  args.directory_slot = directory.stride(0);
  args.directory_head = directory.stride(1);
  args.chunk_stride = chunks.stride(0);
  args.lengths_stride = lengths.stride(0);
  args.rows = static_cast<int>(query.size(0));
  args.heads = static_cast<int>(heads);
  args.group = static_cast<int>(query.size(1) / heads);
  args.first_head = static_cast<int>(first_head);
  args.scale = static_cast<float>(scale * 1.4426950408889634);
  CUtensorMap map;
  const int row_bytes = static_cast<int>(pool.size(2) * pool.element_size());
  C10_CUDA_CHECK(encode_pool(&map, pool.data_ptr(), pool.size(0), row_bytes));
  const int blocks = static_cast<int>(parts.size(1));
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const bool half = query.scalar_type() == at::kHalf, fp8 = pool.scalar_type() == at::kFloat8_e4m3fn;
  const auto launch = half ? (fp8 ? launch_for_size<__half, true> : launch_for_size<__half, false>)
                           : (fp8 ? launch_for_size<__nv_bfloat16, true> : launch_for_size<__nv_bfloat16, false>);
  C10_CUDA_CHECK(launch(dim, args, map, blocks, stream));
}

}  // namespace

TORCH_LIBRARY_IMPL(vllm_kvplug, CUDA, m) {
  m.impl("decode_plan", &decode_plan);
  m.impl("decode_attention_planned", &decode_attention_planned);
}

}  // namespace kvplug
