// Paged attention over float32 KV in blocks of 16 tokens: decode rows, prefill rows and chunks of prefill alike.
//
// A block holds, for every layer, K as [kv_head][head_dim][16] and V as [kv_head][16][head_dim]: scoring 16 tokens and
// adding up their values are then both the product of a few query rows with strips of 16 columns (tile.h).
//
// Softmax runs online, block by block from the start of the context. What a query row computes does not depend on how
// its prompt was cut into chunks nor on the other rows: a block that is masked for it leaves its state exactly as it is.
#include "kernels.h"

#include <vector>

#include "tile.h"

namespace {

using fastserve::Float32;
using fastserve::kLane;
using fastserve::kMaxTile;
using fastserve::kStrip;

constexpr int64_t kBlockSize = kStrip;
constexpr int64_t kMaxHeadDim = 512;
constexpr int64_t kTokensPerTask = 32;
constexpr float kNoScoreYet = -1e30f;  // not -inf: the difference of two of them must be a number

struct Problem {
  const float *query, *key, *value;  // [tokens][heads][head_dim], each with its own token stride
  int64_t query_stride, key_stride, value_stride;
  float* pool;           // of this layer: K heads, then V heads; blocks `block_stride` floats apart
  int64_t block_stride;
  const int32_t *tables, *row_offsets, *ctx_lens;
  int64_t max_blocks, num_rows;
  int64_t num_heads, num_kv_heads, head_dim;
  float scale, softcap;  // softcap 0: none
  int64_t window;        // 0: none
  float* output;         // [tokens][heads][head_dim]
  int64_t output_stride;

  int64_t group() const { return num_heads / num_kv_heads; }
  float* keys(int64_t row, int64_t block, int64_t head) const {
    return pool + tables[row * max_blocks + block] * block_stride + head * head_dim * kBlockSize;
  }
  float* values(int64_t row, int64_t block, int64_t head) const { return keys(row, block, head + num_kv_heads); }
};

struct Task {  // some tokens of a row, one kv head
  int64_t row, head, token, num_tokens;
};

void store_token(const Problem& p, int64_t row, int64_t token) {
  const int64_t position = p.ctx_lens[row] - (p.row_offsets[row + 1] - token);
  const int64_t block = position / kBlockSize, offset = position % kBlockSize;
  for (int64_t head = 0; head < p.num_kv_heads; ++head) {
    const float* key = p.key + token * p.key_stride + head * p.head_dim;
    float* keys = p.keys(row, block, head) + offset;
    for (int64_t d = 0; d < p.head_dim; ++d) keys[d * kBlockSize] = key[d];
    std::memcpy(p.values(row, block, head) + offset * p.head_dim, p.value + token * p.value_stride + head * p.head_dim,
                p.head_dim * sizeof(float));
  }
}

// Running softmax of a tile of query rows.
template <int kRows>
struct State {
  float highest[kRows], total[kRows];
  int64_t first_key[kRows], end_key[kRows];  // keys that the row sees
  alignas(32) float output[kRows][kMaxHeadDim];
  alignas(32) float query[kMaxHeadDim * kRows];  // [head_dim][kRows]
};

// Scores of one block -> weights [16][kRows], and the state they belong to.
template <int kRows>
void weigh(const Problem& p, State<kRows>& state, int64_t first_token, const float (*scores)[kStrip], float* weights) {
  const __m256 minus_infinity = _mm256_set1_ps(-__builtin_inff());
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  for (int r = 0; r < kRows; ++r) {
    __m256 part[2];
    const int low = static_cast<int>(state.first_key[r] - first_token), high = static_cast<int>(state.end_key[r] - first_token);
    for (int half = 0; half < 2; ++half) {
      part[half] = _mm256_mul_ps(_mm256_load_ps(scores[r] + half * kLane), _mm256_set1_ps(p.scale));
      if (p.softcap > 0)
        part[half] = _mm256_mul_ps(_mm256_set1_ps(p.softcap),
                                   fastserve::tanh_ps(_mm256_div_ps(part[half], _mm256_set1_ps(p.softcap))));
      if (low > 0 || high < kStrip) {  // also hides what recycled slots beyond the context hold
        const __m256i at = _mm256_add_epi32(lanes, _mm256_set1_epi32(half * kLane));
        const __m256i seen = _mm256_and_si256(_mm256_cmpgt_epi32(at, _mm256_set1_epi32(low - 1)),
                                              _mm256_cmpgt_epi32(_mm256_set1_epi32(high), at));
        part[half] = _mm256_blendv_ps(minus_infinity, part[half], _mm256_castsi256_ps(seen));
      }
    }
    const float highest = std::max(state.highest[r], fastserve::max_lanes(_mm256_max_ps(part[0], part[1])));
    __m256 sum = _mm256_setzero_ps();
    alignas(32) float weight[kStrip];
    for (int half = 0; half < 2; ++half) {
      part[half] = fastserve::exp_ps(_mm256_sub_ps(part[half], _mm256_set1_ps(highest)));
      sum = _mm256_add_ps(sum, part[half]);
      _mm256_store_ps(weight + half * kLane, part[half]);
    }
    for (int t = 0; t < kStrip; ++t) weights[t * kRows + r] = weight[t];
    if (highest != state.highest[r]) {
      const float shrink = fastserve::exp_scalar(state.highest[r] - highest);
      state.total[r] *= shrink;
      for (int64_t d = 0; d < p.head_dim; d += kLane)
        _mm256_store_ps(state.output[r] + d, _mm256_mul_ps(_mm256_load_ps(state.output[r] + d), _mm256_set1_ps(shrink)));
      state.highest[r] = highest;
    }
    state.total[r] += fastserve::sum_lanes(sum);
  }
}

// state.output += weights x V of one block; only tokens that hold values are read: 0 x NaN would be NaN.
template <int kRows>
void add_values(const Problem& p, State<kRows>& state, const float* weights, const float* values, const float* next,
                int64_t num_tokens) {
  int64_t d = 0;
  for (; d + kStrip <= p.head_dim; d += kStrip) {
    float* out[kRows];
    for (int r = 0; r < kRows; ++r) out[r] = state.output[r] + d;
    fastserve::multiply_tile<Float32, kRows, 4>(weights, reinterpret_cast<const char*>(values + d), p.head_dim * 4,
                                                num_tokens, reinterpret_cast<const char*>(next + d * kBlockSize), out, true);
  }
  for (; d < p.head_dim; d += kLane)
    for (int r = 0; r < kRows; ++r) {
      __m256 sum = _mm256_load_ps(state.output[r] + d);
      for (int64_t t = 0; t < num_tokens; ++t)
        sum = _mm256_fmadd_ps(_mm256_set1_ps(weights[t * kRows + r]), _mm256_loadu_ps(values + t * p.head_dim + d), sum);
      _mm256_store_ps(state.output[r] + d, sum);
    }
}

// Query rows [first, first + kRows) of a task, numbered token by token, in a token head by head of the group.
template <int kRows>
void attend_tile(const Problem& p, const Task& task, int64_t first) {
  State<kRows> state;
  int64_t begin = p.ctx_lens[task.row], end = 0;
  float* outputs[kRows];
  for (int r = 0; r < kRows; ++r) {
    const int64_t token = task.token + (first + r) / p.group();
    const int64_t head = task.head * p.group() + (first + r) % p.group();
    const float* query = p.query + token * p.query_stride + head * p.head_dim;
    for (int64_t d = 0; d < p.head_dim; ++d) state.query[d * kRows + r] = query[d];
    outputs[r] = p.output + token * p.output_stride + head * p.head_dim;
    std::memset(state.output[r], 0, p.head_dim * sizeof(float));
    state.highest[r] = kNoScoreYet;
    state.total[r] = 0;
    state.end_key[r] = p.ctx_lens[task.row] - (p.row_offsets[task.row + 1] - token) + 1;
    state.first_key[r] = p.window > 0 ? std::max<int64_t>(0, state.end_key[r] - p.window) : 0;
    begin = std::min(begin, state.first_key[r]);
    end = std::max(end, state.end_key[r]);
  }

  const int64_t last_block = (end - 1) / kBlockSize;
  for (int64_t block = begin / kBlockSize; block <= last_block; ++block) {
    const int64_t next = std::min(block + 1, last_block);
    alignas(32) float scores[kRows][kStrip];
    alignas(32) float weights[kStrip * kRows];
    float* rows[kRows];
    for (int r = 0; r < kRows; ++r) rows[r] = scores[r];
    fastserve::multiply_tile<Float32, kRows, 4>(
        state.query, reinterpret_cast<const char*>(p.keys(task.row, block, task.head)), kBlockSize * 4, p.head_dim,
        reinterpret_cast<const char*>(p.keys(task.row, next, task.head)), rows, false);
    weigh<kRows>(p, state, block * kBlockSize, scores, weights);
    add_values<kRows>(p, state, weights, p.values(task.row, block, task.head), p.values(task.row, next, task.head),
                      std::min(kBlockSize, end - block * kBlockSize));
  }
  for (int r = 0; r < kRows; ++r) {
    const __m256 inverse = _mm256_set1_ps(1.0f / state.total[r]);
    for (int64_t d = 0; d < p.head_dim; d += kLane)
      _mm256_storeu_ps(outputs[r] + d, _mm256_mul_ps(_mm256_load_ps(state.output[r] + d), inverse));
  }
}

void attend(const Problem& p, const Task& task) {
  const int64_t num_queries = task.num_tokens * p.group();
  const int64_t num_tiles = (num_queries + kMaxTile - 1) / kMaxTile;
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int64_t first = num_queries * tile / num_tiles, rows = num_queries * (tile + 1) / num_tiles - first;
    switch (rows) {
      case 1: attend_tile<1>(p, task, first); break;
      case 2: attend_tile<2>(p, task, first); break;
      case 3: attend_tile<3>(p, task, first); break;
      case 4: attend_tile<4>(p, task, first); break;
      case 5: attend_tile<5>(p, task, first); break;
      default: attend_tile<6>(p, task, first);
    }
  }
}

}  // namespace

extern "C" {

// Stores K and V of all new tokens, then attends. head_dim: a multiple of 8, at most 512. The caller has checked that
// tables name blocks of the pool.
void fastserve_attention(const float* query, int64_t query_stride, const float* key, int64_t key_stride,
                         const float* value, int64_t value_stride, float* pool, int64_t block_stride,
                         const int32_t* tables, int64_t max_blocks, const int32_t* row_offsets,
                         const int32_t* ctx_lens, int64_t num_rows, int64_t num_heads, int64_t num_kv_heads,
                         int64_t head_dim, float scale, float softcap, int64_t window, float* output,
                         int64_t output_stride, int num_threads) {
  const Problem p{query,      key,       value,    query_stride, key_stride, value_stride, pool,   block_stride,
                  tables,     row_offsets, ctx_lens, max_blocks,   num_rows,   num_heads,    num_kv_heads, head_dim,
                  scale,      softcap,   window,   output,       output_stride};
  std::vector<Task> tasks;
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t token = row_offsets[row]; token < row_offsets[row + 1]; ++token) store_token(p, row, token);
    for (int64_t token = row_offsets[row]; token < row_offsets[row + 1]; token += kTokensPerTask)
      for (int64_t head = 0; head < num_kv_heads; ++head)
        tasks.push_back({row, head, token, std::min<int64_t>(kTokensPerTask, row_offsets[row + 1] - token)});
  }
  fastserve::parallel_tasks(static_cast<int64_t>(tasks.size()), num_threads,
                            [&](int64_t index) { attend(p, tasks[index]); });
}
}
