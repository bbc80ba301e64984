// The ops of a CPU step as one function each, for float and bfloat16. build.py compiles this file
// once per machine; kernel_set.py calls it. Arithmetic is fp32. Sums run in an order that depends
// on the row alone, so a row's result does not change with the rows beside it.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

struct bf16 {
  uint16_t bits;
};

inline float load(const float* p) { return *p; }

inline float load(const bf16* p) {
  const uint32_t bits = static_cast<uint32_t>(p->bits) << 16;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline void store(float* p, float x) { *p = x; }

// To the nearest, ties to even, as torch rounds.
inline void store(bf16* p, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  p->bits = static_cast<uint16_t>(is_nan ? 0x7fc0 : rounded);
}

template <typename T>
inline float round_to(float x) {
  T rounded;
  store(&rounded, x);
  return load(&rounded);
}

// Cells, and multiplications of attention, that a second thread is worth waking for.
constexpr int64_t kMinParallelCells = 1 << 16;
constexpr int64_t kMinParallelWork = 200000;

constexpr float kLowest = -std::numeric_limits<float>::infinity();

// Sixteen floats: a register where the processor has such wide ones, several elsewhere.
constexpr int kLanes = 16;
typedef float Lanes __attribute__((vector_size(64), aligned(4)));
typedef int32_t IntLanes __attribute__((vector_size(64), aligned(4)));
typedef uint16_t HalfLanes __attribute__((vector_size(32), aligned(2)));

inline Lanes load_lanes(const float* p) { return *reinterpret_cast<const Lanes*>(p); }

inline Lanes load_lanes(const bf16* p) {
  const HalfLanes bits = *reinterpret_cast<const HalfLanes*>(p);
  return (Lanes)(__builtin_convertvector(bits, IntLanes) << 16);
}

inline void store_lanes(float* p, Lanes x) { std::memcpy(p, &x, sizeof x); }

inline void store_lanes(bf16* p, Lanes x) {
  const IntLanes bits = (IntLanes)x;
  const IntLanes rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const IntLanes whole = x == x ? rounded : IntLanes{} + 0x7fc0;  // a NaN stays one
  const HalfLanes halves = __builtin_convertvector(whole, HalfLanes);
  std::memcpy(p, &halves, sizeof halves);
}

inline Lanes fma(Lanes a, Lanes b, Lanes c) {
#ifdef __AVX512F__
  return (Lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;
#endif
}

// Lanes 2i and 2i + 1 of a and then of b, added.
inline Lanes add_pairs(Lanes a, Lanes b) {
  const IntLanes even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
  return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, even + 1);
}

// Lane i of the result is the sum of rows[i], always in the same order.
inline Lanes sums_of(Lanes (&rows)[kLanes]) {
  for (int n = kLanes / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) rows[i] = add_pairs(rows[2 * i], rows[2 * i + 1]);
  return rows[0];
}

inline float sum_of(Lanes x) {
  for (int i = 0; i < 4; ++i) x = add_pairs(x, x);
  return x[0];
}

// exp of x <= 0 to 2 ulp, 0 below -87. Source: Cody and Waite's reduction, a Taylor polynomial.
inline Lanes exp_of(Lanes x) {
  const Lanes least = (Lanes){} - 87.0f;
  const Lanes clamped = x < least ? least : x;
  // Adding 1.5 * 2^23 rounds to an integer, which then stands in the lowest bits.
  const Lanes magic = (Lanes){} + 12582912.0f;
  const Lanes shifted = clamped * 1.44269504f + magic;
  const Lanes n = shifted - magic;
  Lanes r = fma(n, Lanes{} - 0.693359375f, clamped);
  r = fma(n, Lanes{} + 2.12194440e-4f, r);
  Lanes p = fma(r, Lanes{} + 1.0f / 5040, Lanes{} + 1.0f / 720);
  p = fma(p, r, Lanes{} + (1.0f / 120));
  p = fma(p, r, Lanes{} + (1.0f / 24));
  p = fma(p, r, Lanes{} + (1.0f / 6));
  p = fma(p, r, Lanes{} + 0.5f);
  p = fma(p, r, Lanes{} + 1.0f);
  p = fma(p, r, Lanes{} + 1.0f);
  const Lanes scale = (Lanes)(((IntLanes)shifted - 0x4b400000 + 127) << 23);
  return x < least ? (Lanes){} : p * scale;
}

inline float exp_of(float x) { return exp_of((Lanes){} + x)[0]; }

template <typename T>
inline Lanes round_to(Lanes x) {
  T rounded[kLanes];
  store_lanes(rounded, x);
  return load_lanes(rounded);
}

template <typename T>
void norm_row(const T* x, const T* weight, T* out, int size, float eps) {
  Lanes squares = {};
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Lanes values = load_lanes(x + i);
    squares = fma(values, values, squares);
  }
  for (int l = 0; i < size; ++i, ++l) squares[l] += load(x + i) * load(x + i);
  const float scale = 1.0f / std::sqrt(sum_of(squares) / static_cast<float>(size) + eps);
  for (i = 0; i + kLanes <= size; i += kLanes)
    store_lanes(out + i, round_to<T>(load_lanes(x + i) * scale) * load_lanes(weight + i));
  for (; i < size; ++i) store(out + i, round_to<T>(load(x + i) * scale) * load(weight + i));
}

// x null: the norm of `residual` alone, which is then left as it is.
template <typename T>
void add_rms_norm(const T* x, T* residual, const T* weight, T* out, int64_t rows, int size,
                  float eps) {
#pragma omp parallel for if (rows * size >= kMinParallelCells)
  for (int64_t row = 0; row < rows; ++row) {
    T* r = residual + row * size;
    if (x != nullptr) {
      const T* added = x + row * size;
      int i = 0;
      for (; i + kLanes <= size; i += kLanes)
        store_lanes(r + i, load_lanes(r + i) + load_lanes(added + i));
      for (; i < size; ++i) store(r + i, load(r + i) + load(added + i));
    }
    norm_row(r, weight, out + row * size, size, eps);
  }
}

template <typename T>
void rotate(T* x, int64_t stride, const float* cos_sin, const int64_t* positions, int64_t tokens,
            int heads, int head_dim) {
  const int half = head_dim / 2;
#pragma omp parallel for if (tokens * heads * head_dim >= kMinParallelCells)
  for (int64_t t = 0; t < tokens; ++t) {
    const float* cos = cos_sin + (positions == nullptr ? t : positions[t]) * head_dim;
    const float* sin = cos + half;
    for (int h = 0; h < heads; ++h) {
      T* first = x + t * stride + h * head_dim;
      T* second = first + half;
      int i = 0;
      for (; i + kLanes <= half; i += kLanes) {
        const Lanes a = load_lanes(first + i), b = load_lanes(second + i);
        const Lanes c = load_lanes(cos + i), s = load_lanes(sin + i);
        store_lanes(first + i, a * c - b * s);
        store_lanes(second + i, b * c + a * s);
      }
      for (; i < half; ++i) {
        const float a = load(first + i), b = load(second + i);
        store(first + i, a * cos[i] - b * sin[i]);
        store(second + i, b * cos[i] + a * sin[i]);
      }
    }
  }
}

inline Lanes silu(Lanes x) {
  // exp of -|x| never overflows: each sign of x has a quotient of its own.
  const Lanes e = exp_of(x < 0.0f ? x : -x);
  return x * ((x < 0.0f ? e : Lanes{} + 1.0f) / (e + 1.0f));
}

template <typename T>
void silu_and_mul(const T* gate_up, T* out, int64_t rows, int size) {
#pragma omp parallel for if (rows * size >= kMinParallelCells)
  for (int64_t row = 0; row < rows; ++row) {
    const T* gate = gate_up + row * 2 * size;
    const T* up = gate + size;
    T* y = out + row * size;
    int i = 0;
    for (; i + kLanes <= size; i += kLanes)
      store_lanes(y + i, round_to<T>(silu(load_lanes(gate + i))) * load_lanes(up + i));
    for (; i < size; ++i)
      store(y + i, round_to<T>(silu(Lanes{} + load(gate + i)))[0] * load(up + i));
  }
}

struct Attention {
  const int32_t* kv_indptr;
  const int32_t* kv_indices;
  int64_t q_stride;
  int num_q_heads, num_kv_heads, head_dim;
  float scale;
};

constexpr int kKeyBlock = 64;

// The queries of one row that share a KV head, over all its keys, block by block. kWidth: lanes of
// a head, rounded up; what is behind the head's end counts as 0.
template <typename T, int kWidth>
void attend(const Attention& a, int row, int kv_head, const T* q, const T* k_cache,
            const T* v_cache, T* out) {
  const int dim = a.head_dim, repeats = a.num_q_heads / a.num_kv_heads;
  const int32_t* slots = a.kv_indices + a.kv_indptr[row];
  const int kv_len = a.kv_indptr[row + 1] - a.kv_indptr[row];
  struct Query {
    Lanes q[kWidth], sum[kWidth];
    float scores[kKeyBlock];
    float greatest, weight;
  };
  std::vector<Query> queries(repeats);
  for (int i = 0; i < repeats; ++i) {
    queries[i].greatest = kLowest;
    const T* own = q + row * a.q_stride + (kv_head * repeats + i) * dim;
    for (int d = 0; d < dim; ++d) queries[i].q[d / kLanes][d % kLanes] = load(own + d) * a.scale;
  }
  const auto widen = [&](const T* cache, int key, Lanes* lanes) {
    const T* head = cache + (static_cast<int64_t>(slots[key]) * a.num_kv_heads + kv_head) * dim;
    for (int w = 0; w < kWidth; ++w) {
      if ((w + 1) * kLanes <= dim) {
        lanes[w] = load_lanes(head + w * kLanes);
      } else {
        lanes[w] = Lanes{};
        for (int d = w * kLanes; d < dim; ++d) lanes[w][d % kLanes] = load(head + d);
      }
    }
  };
  for (int start = 0; start < kv_len; start += kKeyBlock) {
    const int count = std::min(kKeyBlock, kv_len - start);
    for (int j = 0; j < count; j += kLanes) {
      const int num_keys = std::min(kLanes, count - j);
      Lanes key[kLanes][kWidth];
      for (int n = 0; n < num_keys; ++n) widen(k_cache, start + j + n, key[n]);
      for (Query& query : queries) {
        Lanes products[kLanes] = {};
        for (int n = 0; n < num_keys; ++n)
          for (int w = 0; w < kWidth; ++w) products[n] = fma(query.q[w], key[n][w], products[n]);
        store_lanes(query.scores + j, sums_of(products));
        for (int n = num_keys; n < kLanes; ++n) query.scores[j + n] = kLowest;
      }
    }
    for (Query& query : queries) {
      float best = query.greatest;
      for (int j = 0; j < count; ++j)
        best = query.scores[j] > best || std::isnan(query.scores[j]) ? query.scores[j] : best;
      // Without this, -inf less -inf would make a NaN of scores that are all -inf.
      const float base = best == kLowest ? 0.0f : best;
      const float shrink = exp_of(query.greatest - base);
      Lanes weights = {};
      for (int j = 0; j < count; j += kLanes) {
        const Lanes terms = exp_of(load_lanes(query.scores + j) - base);
        store_lanes(query.scores + j, terms);
        weights += terms;
      }
      query.weight = query.weight * shrink + sum_of(weights);
      query.greatest = best;
      for (int w = 0; w < kWidth; ++w) query.sum[w] *= shrink;
    }
    for (int j = 0; j < count; ++j) {
      Lanes value[kWidth];
      widen(v_cache, start + j, value);
      for (Query& query : queries)
        for (int w = 0; w < kWidth; ++w)
          query.sum[w] = fma(Lanes{} + query.scores[j], value[w], query.sum[w]);
    }
  }
  for (int i = 0; i < repeats; ++i) {
    T* own = out + (static_cast<int64_t>(row) * a.num_q_heads + kv_head * repeats + i) * dim;
    const float total = queries[i].weight;
    for (int d = 0; d < dim; ++d)
      store(own + d, total == 0.0f ? 0.0f : queries[i].sum[d / kLanes][d % kLanes] / total);
  }
}

template <typename T>
void attend_rows(const Attention& a, int rows, const T* q, const T* k_cache, const T* v_cache,
                 T* out) {
  const int64_t work = static_cast<int64_t>(a.kv_indptr[rows]) * a.num_q_heads * a.head_dim;
  const int tasks = rows * a.num_kv_heads;
  const auto attend_one = a.head_dim <= 64    ? attend<T, 4>
                          : a.head_dim <= 128 ? attend<T, 8>
                                              : attend<T, 16>;
#pragma omp parallel for schedule(dynamic, 1) if (work >= kMinParallelWork && tasks > 1)
  for (int task = 0; task < tasks; ++task)
    attend_one(a, task / a.num_kv_heads, task % a.num_kv_heads, q, k_cache, v_cache, out);
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))
#define FOR_EACH_TYPE(DEFINE) DEFINE(float, f32) DEFINE(bf16, bf16)

#define DEFINE(T, suffix)                                                                          \
  EXPORT void add_rms_norm_##suffix(const T* x, T* residual, const T* weight, T* out,              \
                                    int64_t rows, int size, float eps) {                           \
    add_rms_norm(x, residual, weight, out, rows, size, eps);                                       \
  }                                                                                                \
  EXPORT void apply_rotary_##suffix(T* q, int64_t q_stride, T* k, int64_t k_stride,                \
                                    const float* cos_sin, const int64_t* positions,                \
                                    int64_t tokens, int num_q_heads, int num_kv_heads,             \
                                    int head_dim) {                                                \
    rotate(q, q_stride, cos_sin, positions, tokens, num_q_heads, head_dim);                        \
    rotate(k, k_stride, cos_sin, positions, tokens, num_kv_heads, head_dim);                       \
  }                                                                                                \
  /* How many were stored: fewer than `tokens` where the next slot is not one of `num_slots`. */    \
  EXPORT void silu_and_mul_##suffix(const T* gate_up, T* out, int64_t rows, int size) {            \
    silu_and_mul(gate_up, out, rows, size);                                                        \
  }                                                                                                \
  EXPORT int64_t store_kv_##suffix(const T* k, int64_t k_stride, const T* v, int64_t v_stride,     \
                                   T* k_cache, T* v_cache, const int64_t* slots, int64_t tokens,   \
                                   int size, int64_t num_slots) {                                  \
    for (int64_t t = 0; t < tokens; ++t) {                                                         \
      if (slots[t] < 0 || slots[t] >= num_slots) return t;                                         \
      std::memcpy(k_cache + slots[t] * size, k + t * k_stride, size * sizeof(T));                  \
      std::memcpy(v_cache + slots[t] * size, v + t * v_stride, size * sizeof(T));                  \
    }                                                                                              \
    return tokens;                                                                                 \
  }                                                                                                \
  EXPORT void decode_attention_##suffix(                                                           \
      const T* q, int64_t q_stride, const T* k_cache, const T* v_cache, const int32_t* kv_indptr,  \
      const int32_t* kv_indices, T* out, int rows, int num_q_heads, int num_kv_heads,              \
      int head_dim, float scale) {                                                                 \
    const Attention a{kv_indptr,   kv_indices, q_stride, num_q_heads,                              \
                      num_kv_heads, head_dim,   scale};                                            \
    attend_rows(a, rows, q, k_cache, v_cache, out);                                                \
  }

FOR_EACH_TYPE(DEFINE)
