#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Float8_e4m3fn.h>
#include <torch/library.h>

#include <algorithm>

#include "head_decoder.h"

namespace kvplug {
namespace {

void check_arguments(const at::Tensor& out, const at::Tensor& query, const at::Tensor& pool,
                     const at::Tensor& directory, const at::Tensor& chunks, const at::Tensor& row_slot,
                     const at::Tensor& lengths, int64_t first_head, int64_t num_kv_heads) {
  TORCH_CHECK(query.dim() == 3 && out.sizes() == query.sizes(),
              "decode_attention: out and query must both be [R, Hq, D], got ", out.sizes(), " and ", query.sizes());
  TORCH_CHECK(query.stride(2) == 1 && out.stride(2) == 1,
              "decode_attention: the last dimension of out and query must be contiguous");
  TORCH_CHECK(num_kv_heads > 0 && query.size(1) % num_kv_heads == 0, "decode_attention: ", query.size(1),
              " query heads do not divide among ", num_kv_heads, " KV heads");
  TORCH_CHECK(
      pool.dim() == 3 && pool.size(1) == kPageTokens && pool.size(2) == 2 * query.size(2) && pool.is_contiguous(),
      "decode_attention: pool must be contiguous [P, ", kPageTokens, ", 2*D] with D = ", query.size(2), ", got ",
      pool.sizes());
  TORCH_CHECK(out.scalar_type() == query.scalar_type() &&
                  (query.scalar_type() == pool.scalar_type() || pool.scalar_type() == at::kFloat8_e4m3fn),
              "decode_attention: out, query and pool must have one dtype, or the pool float8_e4m3fn, got ",
              out.scalar_type(), ", ", query.scalar_type(), " and ", pool.scalar_type());
  TORCH_CHECK(directory.dim() == 3 && directory.scalar_type() == at::kInt,
              "decode_attention: directory must be int32 [S, N, W]");
  TORCH_CHECK(chunks.dim() == 2 && chunks.size(1) == kChunkPages && chunks.scalar_type() == at::kInt,
              "decode_attention: chunks must be int32 [C, ", kChunkPages, "]");
  TORCH_CHECK(row_slot.dim() == 1 && row_slot.size(0) == query.size(0) && row_slot.scalar_type() == at::kInt,
              "decode_attention: row_slot must be int32 [R] with R = ", query.size(0));
  TORCH_CHECK(lengths.dim() == 2 && lengths.size(0) == directory.size(0) && lengths.size(1) == directory.size(1) &&
                  lengths.scalar_type() == at::kInt,
              "decode_attention: lengths must be int32 [S, N], the first two dimensions of directory");
  TORCH_CHECK(first_head >= 0 && first_head + num_kv_heads <= directory.size(1), "decode_attention: heads ", first_head,
              " to ", first_head + num_kv_heads - 1, " are outside a directory of ", directory.size(1));
}

template <typename T, typename P>
void decode_rows(const at::Tensor& out, const at::Tensor& query, const at::Tensor& pool, const at::Tensor& directory,
                 const at::Tensor& chunks, const at::Tensor& row_slot, const at::Tensor& lengths, int64_t first_head,
                 int64_t num_kv_heads, float scale) {
  const int64_t dim = query.size(2);
  const int64_t group = query.size(1) / num_kv_heads;
  const int64_t page_size = pool.size(1) * pool.size(2);
  const int64_t capacity = directory.size(2) * kChunkPages * kPageTokens;
  const T* query_data = query.const_data_ptr<T>();
  const P* pool_data = pool.const_data_ptr<P>();
  T* out_data = out.mutable_data_ptr<T>();
  const auto chunk_of = directory.accessor<int32_t, 3>();
  const auto page_of = chunks.accessor<int32_t, 2>();
  const auto slot_of = row_slot.accessor<int32_t, 1>();
  const auto length_of = lengths.accessor<int32_t, 2>();

  at::parallel_for(0, query.size(0) * num_kv_heads, 1, [&](int64_t begin, int64_t end) {
    HeadDecoder<T, P> decoder(group, dim);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / num_kv_heads;
      const int64_t head = item % num_kv_heads;
      const int64_t slot = slot_of[row];
      decoder.start(query_data + row * query.stride(0) + head * group * query.stride(1), query.stride(1), scale);
      if (slot >= 0) {
        TORCH_CHECK_INDEX(slot < directory.size(0), "decode_attention: request slot ", slot, " is outside ",
                          directory.size(0));
        const int64_t length = length_of[slot][first_head + head];
        TORCH_CHECK_INDEX(length <= capacity, "decode_attention: ", length, " tokens exceed the directory's ", capacity);
        for (int64_t first = 0; first < length; first += kPageTokens) {
          const int64_t page = first / kPageTokens;
          const int64_t chunk = chunk_of[slot][first_head + head][page / kChunkPages];
          TORCH_CHECK_INDEX(chunk >= 0 && chunk < chunks.size(0), "decode_attention: chunk ", chunk, " is outside ",
                            chunks.size(0));
          const int64_t page_id = page_of[chunk][page % kChunkPages];
          TORCH_CHECK_INDEX(page_id >= 0 && page_id < pool.size(0), "decode_attention: page ", page_id,
                            " is outside a pool of ", pool.size(0));
          decoder.add_page(pool_data + page_id * page_size,
                           static_cast<int>(std::min<int64_t>(kPageTokens, length - first)));
        }
      }
      decoder.finish(out_data + row * out.stride(0) + head * group * out.stride(1), out.stride(1));
    }
  });
}

void decode_attention(const at::Tensor& out, const at::Tensor& query, const at::Tensor& pool,
                      const at::Tensor& directory, const at::Tensor& chunks, const at::Tensor& row_slot,
                      const at::Tensor& lengths, int64_t first_head, int64_t num_kv_heads, double scale) {
  check_arguments(out, query, pool, directory, chunks, row_slot, lengths, first_head, num_kv_heads);
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    const auto rows = pool.scalar_type() == query.scalar_type() ? decode_rows<T, T> : decode_rows<T, c10::Float8_e4m3fn>;
    rows(out, query, pool, directory, chunks, row_slot, lengths, first_head, num_kv_heads, static_cast<float>(scale));
  };
  switch (query.scalar_type()) {
    case at::kFloat:
      return run(float{});
    case at::kBFloat16:
      return run(at::BFloat16{});
    case at::kHalf:
      return run(at::Half{});
    default:
      TORCH_CHECK(false, "decode_attention: dtype must be float32, bfloat16 or float16, got ", query.scalar_type());
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(vllm_kvplug, CPU, m) {
  m.impl("decode_attention", &decode_attention);
}

}  // namespace kvplug
