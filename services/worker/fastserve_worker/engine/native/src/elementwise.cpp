// The small operations between the products of a decoder layer, each one pass over its data.
// Products and sums round one by one (no contraction), as the same expressions in torch do.
#include "kernels.h"

#include <cmath>

#include "simd.h"

namespace {

using fastserve::kLane;

constexpr int64_t kRowsPerTask = 16;

template <typename Body>
void for_each_row(int64_t num_rows, int num_threads, const Body& body) {
  fastserve::parallel_tasks((num_rows + kRowsPerTask - 1) / kRowsPerTask, num_threads, [&](int64_t task) {
    const int64_t end = std::min(num_rows, (task + 1) * kRowsPerTask);
    for (int64_t row = task * kRowsPerTask; row < end; ++row) body(row);
  });
}

void rms_norm_row(const float* x, const float* weight, float epsilon, int64_t width, float* y) {
  __m256 squares = _mm256_setzero_ps();
  int64_t i = 0;
  for (; i + kLane <= width; i += kLane) squares = _mm256_fmadd_ps(_mm256_loadu_ps(x + i), _mm256_loadu_ps(x + i), squares);
  float sum = fastserve::sum_lanes(squares);
  for (; i < width; ++i) sum += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(sum / static_cast<float>(width) + epsilon);
  const __m256 factors = _mm256_set1_ps(factor);
  for (i = 0; i + kLane <= width; i += kLane)
    _mm256_storeu_ps(y + i, _mm256_mul_ps(_mm256_loadu_ps(weight + i), _mm256_mul_ps(_mm256_loadu_ps(x + i), factors)));
  for (; i < width; ++i) y[i] = weight[i] * (x[i] * factor);
}

// x1 cos1 - x2 sin1 and x2 cos2 + x1 sin2, x1 and x2 being the halves of the rotated dimensions.
void rotate_head(float* x, const float* cos, const float* sin, int64_t half) {
  int64_t i = 0;
  for (; i + kLane <= half; i += kLane) {
    const __m256 x1 = _mm256_loadu_ps(x + i), x2 = _mm256_loadu_ps(x + half + i);
    const __m256 y1 = _mm256_sub_ps(_mm256_mul_ps(x1, _mm256_loadu_ps(cos + i)), _mm256_mul_ps(x2, _mm256_loadu_ps(sin + i)));
    const __m256 y2 = _mm256_add_ps(_mm256_mul_ps(x2, _mm256_loadu_ps(cos + half + i)),
                                    _mm256_mul_ps(x1, _mm256_loadu_ps(sin + half + i)));
    _mm256_storeu_ps(x + i, y1);
    _mm256_storeu_ps(x + half + i, y2);
  }
  for (; i < half; ++i) {
    const float x1 = x[i], x2 = x[half + i];
    x[i] = x1 * cos[i] - x2 * sin[i];
    x[half + i] = x2 * cos[half + i] + x1 * sin[half + i];
  }
}

}  // namespace

extern "C" {

// y[row][group] = weight * x / rms(x), over num_rows x num_groups vectors of `width`; x and y may be the same.
void fastserve_rms_norm(const float* x, int64_t x_stride, int64_t num_rows, int64_t num_groups, int64_t width,
                        const float* weight, float epsilon, float* y, int64_t y_stride, int num_threads) {
  for_each_row(num_rows, num_threads, [&](int64_t row) {
    for (int64_t group = 0; group < num_groups; ++group)
      rms_norm_row(x + row * x_stride + group * width, weight, epsilon, width, y + row * y_stride + group * width);
  });
}

// Rotates the first `rotary_dim` of each of num_heads heads, in place. cos and sin: [rows][rotary_dim].
void fastserve_rotate(float* x, int64_t x_stride, int64_t num_rows, int64_t num_heads, int64_t head_dim,
                      int64_t rotary_dim, const float* cos, const float* sin, int num_threads) {
  for_each_row(num_rows, num_threads, [&](int64_t row) {
    for (int64_t head = 0; head < num_heads; ++head)
      rotate_head(x + row * x_stride + head * head_dim, cos + row * rotary_dim, sin + row * rotary_dim, rotary_dim / 2);
  });
}

// y[row] = silu(gate) * up, where x[row] is gate followed by up, each `width` long.
void fastserve_silu_mul(const float* x, int64_t num_rows, int64_t width, float* y, int num_threads) {
  for_each_row(num_rows, num_threads, [&](int64_t row) {
    const float *gate = x + row * 2 * width, *up = gate + width;
    int64_t i = 0;
    for (; i + kLane <= width; i += kLane)
      _mm256_storeu_ps(y + row * width + i,
                       _mm256_mul_ps(fastserve::silu_ps(_mm256_loadu_ps(gate + i)), _mm256_loadu_ps(up + i)));
    for (; i < width; ++i)
      y[row * width + i] = gate[i] / (1.0f + fastserve::exp_scalar(-gate[i])) * up[i];
  });
}
}
