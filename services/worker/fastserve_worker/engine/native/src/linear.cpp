// y = x W^T (+ bias) (+ residual) for row-major x, with W repacked once into panels of 16 output features.
//
// Packed weights: inputs are cut into blocks of 384; in a block, one panel after another; in a panel, for each input k,
// the weights of its 16 features next to each other. Within a block a piece of panel (24 KiB) fits in the first-level
// cache beside a tile of x. An iteration reads the weights from memory exactly once per block of rows, in the order they
// are stored, whatever the number of rows: the first tile takes a piece from memory, the others from cache, and all of
// them prefetch their share of the next piece.
//
// Each output is one chain of fused multiply-adds over k in ascending order. It depends on neither the number of rows
// nor their place in the batch nor the number of threads: results are bitwise batch-invariant.
#include "kernels.h"

#include <vector>

#include "tile.h"

namespace {

using fastserve::Bfloat16;
using fastserve::Float16;
using fastserve::Float32;
using fastserve::kMaxTile;
using fastserve::kStrip;

constexpr int64_t kInputBlock = 384;  // inputs per pass
constexpr int64_t kRowBlock = 192;    // rows per pass: their part of x stays in the second-level cache

struct Problem {
  const float* x;
  int64_t x_stride;
  const char* panels;
  int64_t num_inputs;   // K
  int64_t num_outputs;  // N
  const float* bias;      // or null
  const float* residual;  // [rows, N], or null
  float* y;
  int64_t y_stride;
};

struct Pass {  // inputs [begin, end), and the pieces of all panels for them
  int64_t begin, end;
  const char* pieces;
};

// Rows of one tile side by side: tile[k * rows + r].
void pack_tile(const Problem& p, const Pass& pass, int64_t row, int rows, float* tile) {
  for (int r = 0; r < rows; ++r) {
    const float* x = p.x + (row + r) * p.x_stride + pass.begin;
    for (int64_t k = 0; k < pass.end - pass.begin; ++k) tile[k * rows + r] = x[k];
  }
}

// Where a tile's outputs go: y itself or, where the last panel is wider than y, a buffer of full width.
template <int kRows>
struct Outputs {
  float* row[kRows];
  int64_t width;
  alignas(32) float edge[kRows][kStrip];

  Outputs(const Problem& p, bool keep, int64_t first_row, int64_t column)
      : width(std::min<int64_t>(kStrip, p.num_outputs - column)) {
    for (int r = 0; r < kRows; ++r) {
      row[r] = p.y + (first_row + r) * p.y_stride + column;
      if (width == kStrip) continue;
      if (keep) std::memcpy(edge[r], row[r], width * sizeof(float));
      row[r] = edge[r];
    }
  }

  void finish(const Problem& p, bool last_pass, int64_t first_row, int64_t column) {
    for (int r = 0; r < kRows; ++r) {
      if (last_pass && p.bias != nullptr)
        for (int64_t c = 0; c < width; ++c) row[r][c] += p.bias[column + c];
      if (last_pass && p.residual != nullptr)
        for (int64_t c = 0; c < width; ++c) row[r][c] += p.residual[(first_row + r) * p.num_outputs + column + c];
      if (width < kStrip)
        std::memcpy(p.y + (first_row + r) * p.y_stride + column, row[r], width * sizeof(float));
    }
  }
};

template <typename W, int kRows, int kPrefetch>
void run_tile(const Problem& p, const Pass& pass, const float* tile, int64_t row, int64_t column, const char* piece,
              const char* ahead) {
  const bool resume = pass.begin > 0;  // later passes start from what is in y
  Outputs<kRows> out(p, resume, row, column);
  fastserve::multiply_tile<W, kRows, kPrefetch>(tile, piece, kStrip * W::kBytes, pass.end - pass.begin, ahead, out.row,
                                                resume);
  out.finish(p, pass.end == p.num_inputs, row, column);
}

template <typename W, int kPrefetch>
void run_tile_of(int rows, const Problem& p, const Pass& pass, const float* tile, int64_t row, int64_t column,
                 const char* piece, const char* ahead) {
  switch (rows) {
    case 1: return run_tile<W, 1, kPrefetch>(p, pass, tile, row, column, piece, ahead);
    case 2: return run_tile<W, 2, kPrefetch>(p, pass, tile, row, column, piece, ahead);
    case 3: return run_tile<W, 3, kPrefetch>(p, pass, tile, row, column, piece, ahead);
    case 4: return run_tile<W, 4, kPrefetch>(p, pass, tile, row, column, piece, ahead);
    case 5: return run_tile<W, 5, kPrefetch>(p, pass, tile, row, column, piece, ahead);
    default: return run_tile<W, 6, kPrefetch>(p, pass, tile, row, column, piece, ahead);
  }
}

// Rows [begin, end) against panels [first, last), one pass.
template <typename W>
void run_pass(const Problem& p, const Pass& pass, int64_t begin, int64_t end, int64_t first, int64_t last) {
  thread_local std::vector<float> packed;
  const int64_t num_tiles = (end - begin + kMaxTile - 1) / kMaxTile;
  const int64_t length = pass.end - pass.begin;
  packed.resize((end - begin) * length);
  // Tiles as equal as possible: 16 rows run as 6 + 5 + 5, not 6 + 6 + 4.
  const auto tile_begin = [&](int64_t tile) { return begin + (end - begin) * tile / num_tiles; };
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int64_t row = tile_begin(tile);
    pack_tile(p, pass, row, static_cast<int>(tile_begin(tile + 1) - row), packed.data() + (row - begin) * length);
  }

  constexpr int kLines = static_cast<int>(W::kBytes);  // lines of a piece per 4 inputs
  const int64_t piece_bytes = length * kStrip * W::kBytes;
  const int64_t share = piece_bytes / num_tiles / 64 * 64;
  for (int64_t index = first; index < last; ++index) {
    const char* piece = pass.pieces + index * piece_bytes;
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      const int64_t row = tile_begin(tile), column = index * kStrip;
      const int rows = static_cast<int>(tile_begin(tile + 1) - row);
      const float* x = packed.data() + (row - begin) * length;
      const char* ahead = piece + piece_bytes + tile * share;
      if (num_tiles == 1) run_tile_of<W, kLines>(rows, p, pass, x, row, column, piece, ahead);
      else if (num_tiles < kLines) run_tile_of<W, (kLines + 1) / 2>(rows, p, pass, x, row, column, piece, ahead);
      else run_tile_of<W, 1>(rows, p, pass, x, row, column, piece, ahead);
    }
  }
}

template <typename W>
void run(const Problem& p, int64_t num_rows, int num_threads) {
  const int64_t num_panels = (p.num_outputs + kStrip - 1) / kStrip;
  const int64_t threads = std::min<int64_t>(num_threads, num_panels);
  fastserve::parallel_tasks(threads, static_cast<int>(threads), [&](int64_t thread) {
    const int64_t first = num_panels * thread / threads, last = num_panels * (thread + 1) / threads;
    for (int64_t begin = 0; begin < num_rows; begin += kRowBlock) {
      const int64_t end = std::min(begin + kRowBlock, num_rows);
      for (int64_t k = 0; k < p.num_inputs; k += kInputBlock) {
        const char* pieces = p.panels + k * num_panels * kStrip * W::kBytes;
        run_pass<W>(p, Pass{k, std::min(k + kInputBlock, p.num_inputs), pieces}, begin, end, first, last);
      }
    }
  });
}

}  // namespace

extern "C" {

int64_t fastserve_input_block() { return kInputBlock; }

// kind: 0 float32, 1 bfloat16, 2 float16. panels: ceil(N / 16) * K * 16 weights, columns beyond N zero.
void fastserve_linear(const float* x, int64_t num_rows, int64_t x_stride, const void* panels, int kind,
                      int64_t num_inputs, int64_t num_outputs, const float* bias, const float* residual, float* y,
                      int64_t y_stride, int num_threads) {
  const Problem p{x,    x_stride, static_cast<const char*>(panels), num_inputs, num_outputs,
                  bias, residual, y, y_stride};
  if (kind == 0) run<Float32>(p, num_rows, num_threads);
  else if (kind == 1) run<Bfloat16>(p, num_rows, num_threads);
  else run<Float16>(p, num_rows, num_threads);
}
}
