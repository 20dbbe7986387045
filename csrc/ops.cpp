// The schemas of all custom ops; the implementations register themselves in cpu/ and cuda/.
#include <torch/library.h>

TORCH_LIBRARY(vllm_kvplug, m) {
  m.def("kv_write(Tensor(a!) pool, Tensor key, Tensor value, Tensor dest) -> ()");
  m.def("gather_rows(Tensor(a!) out, Tensor pool, Tensor rows) -> ()");
  m.def("scatter_rows(Tensor(a!) pool, Tensor values, Tensor rows) -> ()");
  m.def(
      "decode_attention(Tensor(a!) out, Tensor query, Tensor pool, Tensor directory, Tensor chunks, "
      "Tensor row_slot, Tensor lengths, int first_head, int num_kv_heads, float scale) -> ()");
  m.def(
      "decode_plan(Tensor(a!) parts, Tensor(b!) starts, Tensor row_slot, Tensor lengths, int num_kv_heads) -> ()");
  m.def(
      "decode_attention_planned(Tensor(a!) out, Tensor query, Tensor pool, Tensor directory, Tensor chunks, "
      "Tensor row_slot, Tensor lengths, int first_head, int num_kv_heads, float scale, Tensor parts, Tensor starts, "
      "Tensor(b!) partial, Tensor(c!) sums, Tensor(d!) arrived, Tensor? scales) -> ()");
  m.def("higgs_encode(Tensor(a!) codes, Tensor(b!) scale, Tensor x, Tensor grid) -> ()");
  m.def("higgs_decode(Tensor(a!) out, Tensor codes, Tensor scale, Tensor grid) -> ()");
  m.def("higgs_scores(Tensor(a!) out, Tensor lut, Tensor codes, Tensor scale) -> ()");
  m.def("landmark_scores(Tensor(a!) out, Tensor lut, Tensor pages, Tensor page, int page_tokens) -> ()");
  m.def(
      "fetch_tokens(Tensor(a!) pool, Tensor rows, Tensor source, Tensor position, Tensor dest, Tensor frequencies, "
      "Tensor? grid, ScalarType dtype, Tensor? count=None) -> ()");
}
