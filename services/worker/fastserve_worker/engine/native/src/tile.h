// The one inner loop of linear layers and attention: a few rows times a strip of 16 columns.
#pragma once
#include "simd.h"

namespace fastserve {

constexpr int kStrip = 16;   // columns: two registers
constexpr int kMaxTile = 6;  // rows: 12 of the 16 registers accumulate

// How weights are stored. All are widened exactly; products and sums are float32.
struct Float32 {
  static constexpr int64_t kBytes = 4;
  static __m256 load(const char* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); }
};
struct Bfloat16 {
  static constexpr int64_t kBytes = 2;
  static __m256 load(const char* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
};
struct Float16 {
  static constexpr int64_t kBytes = 2;
  static __m256 load(const char* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
};

// out[r][0..16) (+)= sum over k < length of tile[k * kRows + r] * strip[k][0..16), strip rows `step` bytes apart.
//
// Every output is one chain of fused multiply-adds in ascending k, so it does not depend on the other rows. On the way,
// kPrefetch cache lines from `ahead` on are requested per four k. Accumulators are named one by one: as an array the
// compiler would keep them in memory.
template <typename W, int kRows, int kPrefetch>
inline void multiply_tile(const float* tile, const char* strip, int64_t step, int64_t length, const char* ahead,
                          float* const* out, bool resume) {
  __m256 w_low, w_high, x;
#define FOR_EACH_ROW(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5)
#define DECLARE(r) __m256 low##r = _mm256_setzero_ps(), high##r = low##r;
#define RESUME(r)                                  \
  if constexpr (r < kRows) {                       \
    low##r = _mm256_loadu_ps(out[r]);              \
    high##r = _mm256_loadu_ps(out[r] + kLane);     \
  }
#define ACCUMULATE(r)                              \
  if constexpr (r < kRows) {                       \
    x = _mm256_broadcast_ss(tile + r);             \
    low##r = _mm256_fmadd_ps(x, w_low, low##r);    \
    high##r = _mm256_fmadd_ps(x, w_high, high##r); \
  }
#define STORE(r)                                   \
  if constexpr (r < kRows) {                       \
    _mm256_storeu_ps(out[r], low##r);              \
    _mm256_storeu_ps(out[r] + kLane, high##r);     \
  }
#define ONE_STEP                                   \
  w_low = W::load(strip);                          \
  w_high = W::load(strip + kLane * W::kBytes);     \
  FOR_EACH_ROW(ACCUMULATE)                         \
  strip += step;                                   \
  tile += kRows;

  FOR_EACH_ROW(DECLARE)
  if (resume) {
    FOR_EACH_ROW(RESUME)
  }
  for (; length >= 4; length -= 4) {
    for (int line = 0; line < kPrefetch; ++line) _mm_prefetch(ahead + line * 64, _MM_HINT_T1);
    ahead += kPrefetch * 64;
    ONE_STEP ONE_STEP ONE_STEP ONE_STEP
  }
  for (; length > 0; --length) {
    ONE_STEP
  }
  FOR_EACH_ROW(STORE)
#undef ONE_STEP
#undef STORE
#undef ACCUMULATE
#undef RESUME
#undef DECLARE
#undef FOR_EACH_ROW
}

}  // namespace fastserve
