// A decoder layer of Llama's form in one call: what is left outside is one Python function per layer and iteration.
#include "kernels.h"

#include <algorithm>
#include <vector>

namespace {

constexpr int64_t kRowBlock = 192;  // rows whose intermediate values stay in cache from one product to the next

}  // namespace

extern "C" {

struct FastserveWeight {
  const void* panels;
  const float* bias;  // or null
  int64_t kind, num_inputs, num_outputs;
};

struct FastserveNorm {
  const float* weight;  // null: no such norm
  float epsilon;
};

struct FastserveLayer {
  FastserveWeight qkv, output, gate_up, down;
  FastserveNorm input_norm, mlp_norm, query_norm, key_norm;
  int64_t num_heads, num_kv_heads, head_dim;
  int64_t window;
  float scale, softcap;
};

struct FastserveBatch {
  int64_t num_tokens, num_rows, max_blocks, block_stride;
  const int32_t *tables, *row_offsets, *ctx_lens;
};
}

namespace {

void multiply(const FastserveWeight& w, const float* x, int64_t rows, const float* residual, float* y, int num_threads) {
  fastserve_linear(x, rows, w.num_inputs, w.panels, static_cast<int>(w.kind), w.num_inputs, w.num_outputs, w.bias,
                   residual, y, w.num_outputs, num_threads);
}

void normalise(const FastserveNorm& norm, const float* x, int64_t rows, int64_t width, float* y, int num_threads) {
  fastserve_rms_norm(x, width, rows, 1, width, norm.weight, norm.epsilon, y, width, num_threads);
}

// Grows and never shrinks: as large as the largest batch so far.
float* scratch(std::vector<float>& buffer, int64_t size) {
  if (static_cast<int64_t>(buffer.size()) < size) buffer.resize(size);
  return buffer.data();
}

}  // namespace

extern "C" {

// hidden [tokens][width] -> result [tokens][width]. cos and sin: [tokens][rotary_dim].
void fastserve_decoder_layer(const FastserveLayer* layer, const FastserveBatch* batch, float* pool, const float* cos,
                             const float* sin, int64_t rotary_dim, const float* hidden, float* result,
                             int num_threads) {
  thread_local std::vector<float> qkv_buffer, attended_buffer, block_buffer;
  const int64_t tokens = batch->num_tokens, width = layer->output.num_outputs, dim = layer->head_dim;
  const int64_t heads = layer->num_heads, kv_heads = layer->num_kv_heads;
  const int64_t qkv_width = layer->qkv.num_outputs, gate_up_width = layer->gate_up.num_outputs;
  float* qkv = scratch(qkv_buffer, tokens * qkv_width);
  float* attended = scratch(attended_buffer, tokens * heads * dim);
  const int64_t block_rows = std::min(tokens, kRowBlock);
  float* normed = scratch(block_buffer, block_rows * (width + width + gate_up_width + gate_up_width / 2));
  float* middle = normed + block_rows * width;
  float* gate_up = middle + block_rows * width;
  float* activated = gate_up + block_rows * gate_up_width;

  for (int64_t row = 0; row < tokens; row += kRowBlock) {
    const int64_t rows = std::min(kRowBlock, tokens - row);
    normalise(layer->input_norm, hidden + row * width, rows, width, normed, num_threads);
    multiply(layer->qkv, normed, rows, nullptr, qkv + row * qkv_width, num_threads);
  }
  float *key = qkv + heads * dim, *value = key + kv_heads * dim;
  if (layer->query_norm.weight != nullptr)
    fastserve_rms_norm(qkv, qkv_width, tokens, heads, dim, layer->query_norm.weight, layer->query_norm.epsilon, qkv,
                       qkv_width, num_threads);
  if (layer->key_norm.weight != nullptr)
    fastserve_rms_norm(key, qkv_width, tokens, kv_heads, dim, layer->key_norm.weight, layer->key_norm.epsilon, key,
                       qkv_width, num_threads);
  fastserve_rotate(qkv, qkv_width, tokens, heads + kv_heads, dim, rotary_dim, cos, sin, num_threads);
  fastserve_attention(qkv, qkv_width, key, qkv_width, value, qkv_width, pool, batch->block_stride, batch->tables,
                      batch->max_blocks, batch->row_offsets, batch->ctx_lens, batch->num_rows, heads, kv_heads, dim,
                      layer->scale, layer->softcap, layer->window, attended, heads * dim, num_threads);
  for (int64_t row = 0; row < tokens; row += kRowBlock) {
    const int64_t rows = std::min(kRowBlock, tokens - row);
    multiply(layer->output, attended + row * heads * dim, rows, hidden + row * width, middle, num_threads);
    normalise(layer->mlp_norm, middle, rows, width, normed, num_threads);
    multiply(layer->gate_up, normed, rows, nullptr, gate_up, num_threads);
    fastserve_silu_mul(gate_up, rows, gate_up_width / 2, activated, num_threads);
    multiply(layer->down, activated, rows, middle, result + row * width, num_threads);
  }
}
}
