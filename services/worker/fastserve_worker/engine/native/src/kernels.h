// The exported functions; each is described where it is defined.
#pragma once
#include <cstdint>

extern "C" {
void fastserve_linear(const float* x, int64_t num_rows, int64_t x_stride, const void* panels, int kind,
                      int64_t num_inputs, int64_t num_outputs, const float* bias, const float* residual, float* y,
                      int64_t y_stride, int num_threads);
void fastserve_attention(const float* query, int64_t query_stride, const float* key, int64_t key_stride,
                         const float* value, int64_t value_stride, float* pool, int64_t block_stride,
                         const int32_t* tables, int64_t max_blocks, const int32_t* row_offsets,
                         const int32_t* ctx_lens, int64_t num_rows, int64_t num_heads, int64_t num_kv_heads,
                         int64_t head_dim, float scale, float softcap, int64_t window, float* output,
                         int64_t output_stride, int num_threads);
void fastserve_rms_norm(const float* x, int64_t x_stride, int64_t num_rows, int64_t num_groups, int64_t width,
                        const float* weight, float epsilon, float* y, int64_t y_stride, int num_threads);
void fastserve_rotate(float* x, int64_t x_stride, int64_t num_rows, int64_t num_heads, int64_t head_dim,
                      int64_t rotary_dim, const float* cos, const float* sin, int num_threads);
void fastserve_silu_mul(const float* x, int64_t num_rows, int64_t width, float* y, int num_threads);
}
