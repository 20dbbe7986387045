// The schemas of all custom ops; the implementations register themselves in cpu/ and cuda/.
#include <torch/library.h>

TORCH_LIBRARY(vllm_kvplug, m) {
  m.def("kv_write(Tensor(a!) pool, Tensor key, Tensor value, Tensor dest) -> ()");
  m.def(
      "decode_attention(Tensor(a!) out, Tensor query, Tensor pool, Tensor directory, Tensor chunks, "
      "Tensor row_slot, Tensor lengths, int first_head, int num_kv_heads, float scale) -> ()");
}
