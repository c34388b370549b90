// Skinny matrix product: y[M, N] = x[M, K] W[N, K]^T for few rows M, on weights packed once at load.
//
// Packed weights are panels of PANEL = 2 vectors of outputs: panel p holds, for k = 0, 1, ..., K-1 one after the
// other, the weights of outputs p * PANEL ... p * PANEL + PANEL - 1. A product reads a panel as one stream. Outputs
// past N are padded with zeros.
//
// bfloat16 weights of a bfloat16 model are kept in pairs where the processor multiplies pairs (dtype BF16_PAIRS): for
// k = 0, 2, 4, ... the pairs of all outputs of the panel. Activations are paired likewise, and a step of the sums is
// two values of k.
//
// Every output is the float32 sum of its blocks of DEPTH_BLOCK values of k, each a chain of fused multiply-adds in the
// order of k, begun at 0. That is so whatever the number of rows, the tile or the thread that computes it: a row's
// results do not depend on its neighbours.
#pragma once

#include <algorithm>
#include <type_traits>

#include "parallel.h"
#include "vec.h"

constexpr int PANEL = 2 * VL;

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int REGISTERS = 32;
#else
constexpr int REGISTERS = 16;
#endif
constexpr int MAX_ROWS = REGISTERS == 32 ? 12 : 6;  // of a register tile, with two accumulators each

// Rows whose activations are reused from the second-level cache while the panels go by.
constexpr int64_t ROW_BLOCK = MAX_ROWS * 16;
// Depth of one pass over a panel. Shorter chains of sums are more exact, longer ones cost less.
constexpr int64_t DEPTH_BLOCK = 1024;
// How far ahead of its place in a panel a tile fetches; more panels at once are more streams, each nearer.
constexpr int prefetch_bytes(int panels) { return panels == 1 ? 2048 : 1024; }

// What a weight element W is multiplied with (X), in which vectors (V), and how many values of k it holds (PER).
template <class W> struct Operand {
    using X = float;
    using V = vf;
    static constexpr int PER = 1;
};
#if defined(LS_BF16_PAIRS)
template <> struct Operand<bf16_pair> {
    using X = bf16_pair;
    using V = vpairs;
    static constexpr int PER = 2;
};
#endif

// Panels computed together, as many as the registers hold (sums, one activation, and weights unless they need no
// widening and come straight from memory), so that few rows still keep the multipliers and the memory busy.
template <class W> constexpr int panels_at_once(int rows) {
    const int free = REGISTERS - 1 - (sizeof(W) == 4 ? 2 : 4);
    return rows == 1 || rows * 8 <= free ? 4 : rows * 4 <= free ? 2 : 1;
}

// Mirrored in kernels.py.
struct PackedWeight {
    const void* panels;
    const float* bias;  // laid out as a row of the panels, or null
    int64_t n, k;
    int64_t spacing;  // 1, or 2 if the panels alternate with those of another weight
    int64_t dtype;

    int64_t panel_count() const { return (n + PANEL - 1) / PANEL; }
};

// Adds the bias of a panel to its sums.
LS_INLINE void add_bias(const PackedWeight& weight, int64_t panel, vf& low, vf& high) {
    if (!weight.bias) return;
    const float* bias = weight.bias + panel * weight.spacing * PANEL;
    low = vadd(low, vload(bias));
    high = vadd(high, vload(bias + VL));
}

// What a tile does with the values already in its output.
enum Existing { IGNORE, ADD_TO, CONTINUE };

// One register tile: out[r * ldo + column] = rows r of x times NP panels, `step` elements from one k to the next. IGNORE and ADD_TO compute a chain of its own,
// CONTINUE goes on with the chain whose value so far is in `out`.
// While it computes, the memory from `ahead` on (ahead_step bytes for every k) is fetched for the tiles that follow.
template <class W, int MR, int NP>
static void tile(const typename Operand<W>::X* x, int64_t ldx, const W* panel, int64_t panel_stride, int64_t step, int64_t depth,
                 Existing existing, const char* ahead, int64_t ahead_step, float* out, int64_t ldo) {
    vf acc[MR][NP][2];
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < NP; ++p) {
            acc[r][p][0] = existing == CONTINUE ? vload(out + r * ldo + p * PANEL) : vset(0.0f);
            acc[r][p][1] = existing == CONTINUE ? vload(out + r * ldo + p * PANEL + VL) : vset(0.0f);
        }
    for (int64_t k = 0; k < depth; ++k) {
        typename Operand<W>::V w[NP][2];
        __builtin_prefetch(ahead + k * ahead_step, 0, 2);
#pragma GCC unroll 4
        for (int p = 0; p < NP; ++p) {
            const W* at = panel + p * panel_stride + k * step;
#pragma GCC unroll 2
            for (int line = 0; line < int(PANEL * sizeof(W)); line += 64)
                __builtin_prefetch((const char*)at + prefetch_bytes(NP) + line, 0, 3);
            vload_pair(at, w[p][0], w[p][1]);
        }
#pragma GCC unroll 16
        for (int r = 0; r < MR; ++r) {
            const typename Operand<W>::V a = vset(x[r * ldx + k]);
#pragma GCC unroll 4
            for (int p = 0; p < NP; ++p) {
                acc[r][p][0] = vfma(a, w[p][0], acc[r][p][0]);
                acc[r][p][1] = vfma(a, w[p][1], acc[r][p][1]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < NP; ++p) {
            float* at = out + r * ldo + p * PANEL;
            vstore(at, existing == ADD_TO ? vadd(vload(at), acc[r][p][0]) : acc[r][p][0]);
            vstore(at + VL, existing == ADD_TO ? vadd(vload(at + VL), acc[r][p][1]) : acc[r][p][1]);
        }
}

template <class W>
using TileFunction = void (*)(const typename Operand<W>::X*, int64_t, const W*, int64_t, int64_t, int64_t, Existing, const char*,
                              int64_t, float*, int64_t);

template <class W> struct Tiles {
    TileFunction<W> wide[MAX_ROWS + 1];    // panels_at_once(rows) panels
    TileFunction<W> single[MAX_ROWS + 1];  // one panel

    constexpr Tiles() : wide{}, single{} { fill<MAX_ROWS>(); }

   private:
    template <int MR> constexpr void fill() {
        wide[MR] = &tile<W, MR, panels_at_once<W>(MR)>;
        single[MR] = &tile<W, MR, 1>;
        if constexpr (MR > 1) fill<MR - 1>();
    }
};

// This thread's part of the product of x[m, k] (row stride ldx, both in steps of the sums) and `weight`. Panels come in
// units of UNIT; store(row, unit, results) receives the UNIT * PANEL float32 results of a row.
template <class W, int UNIT, class Store>
static void multiply(const Team& team, const typename Operand<W>::X* x, int64_t ldx, int64_t m,
                     const PackedWeight& weight, Store&& store) {
    static constexpr Tiles<W> tiles;
    const int64_t units = weight.panel_count() / UNIT;
    using X = typename Operand<W>::X;
    const int64_t steps = weight.k / Operand<W>::PER;
    constexpr int64_t STEP_BLOCK = DEPTH_BLOCK / Operand<W>::PER;
    const int64_t panel_size = steps * PANEL * weight.spacing;
    // When there are few panels a thread, the rows are divided as well.
    int64_t row_parts = 1;
    while (units * row_parts < 4 * team.size && m / row_parts >= 2 * MAX_ROWS) row_parts *= 2;
    int64_t task, last_task;
    team.share(units * row_parts, task, last_task);
    float results[MAX_ROWS * 4 * PANEL];
    while (task < last_task) {
        const int64_t part = task / units, first_unit = task % units;
        const int64_t end_unit = std::min(units, first_unit + last_task - task);
        task += end_unit - first_unit;
        const int64_t part_end = m * (part + 1) / row_parts;
        for (int64_t block = m * part / row_parts; block < part_end; block += ROW_BLOCK) {
            const int64_t rows = std::min(ROW_BLOCK, part_end - block);
            const int64_t row_tiles = (rows + MAX_ROWS - 1) / MAX_ROWS;
            const int wide = std::max(panels_at_once<W>(int((rows + row_tiles - 1) / row_tiles)), UNIT);
            for (int64_t unit = first_unit; unit < end_unit;) {
                const int panels = int(std::min<int64_t>(wide, (end_unit - unit) * UNIT));
                const W* panel = static_cast<const W*>(weight.panels) + unit * UNIT * panel_size;
                // Several tiles share out the fetching of the next panels; a single one streams through its own.
                const int64_t ahead_step = row_tiles > 1 ? panels * PANEL * int64_t(sizeof(W)) / row_tiles : 0;
                const char* ahead = reinterpret_cast<const char*>(row_tiles > 1 ? panel + panels * panel_size : panel);
                for (int64_t t = 0; t < row_tiles; ++t) {
                    const int64_t row = block + rows * t / row_tiles;
                    const int count = int(block + rows * (t + 1) / row_tiles - row);
                    for (int64_t depth = 0; depth < steps; depth += STEP_BLOCK) {
                        const int64_t length = std::min(STEP_BLOCK, steps - depth);
                        const Existing existing = depth ? ADD_TO : IGNORE;
                        const X* from = x + row * ldx + depth;
                        if (panels == panels_at_once<W>(count)) {
                            tiles.wide[count](from, ldx, panel + depth * PANEL, panel_size, PANEL, length, existing,
                                              ahead, ahead_step, results, panels * PANEL);
                            ahead += length * ahead_step;
                            continue;
                        }
                        for (int p = 0; p < panels; ++p) {
                            tiles.single[count](from, ldx, panel + p * panel_size + depth * PANEL, panel_size, PANEL,
                                                length, existing, ahead, ahead_step / panels, results + p * PANEL,
                                                panels * PANEL);
                            ahead += length * (ahead_step / panels);
                        }
                    }
                    for (int r = 0; r < count; ++r)
                        for (int u = 0; u < panels / UNIT; ++u)
                            store(row + r, unit + u, results + (r * panels + u * UNIT) * PANEL);
                }
                unit += panels / UNIT;
            }
        }
    }
}

template <class T> LS_INLINE void widen_row(const T* from, int64_t n, float* to) {
    int64_t i = 0;
    for (; i + VL <= n; i += VL) vstore(to + i, vload(from + i));
    for (; i < n; ++i) to[i] = to_float(from[i]);
}

template <class T> LS_INLINE void narrow_row(const float* from, int64_t n, T* to) {
    int64_t i = 0;
    for (; i + VL <= n; i += VL) vstore(to + i, vload(from + i));
    for (; i < n; ++i) store_one(to + i, from[i]);
}

LS_INLINE void widen_row(const bf16* from, int64_t n, bf16* to) { memcpy(to, from, size_t(n) * sizeof(bf16)); }

// This thread's share of widening (or only copying) x[m, k] to rows of stride ldx.
template <class T, class A>
static void widen(const Team& team, const T* x, int64_t m, int64_t k, A* out, int64_t ldx) {
    int64_t begin, end;
    team.share((k + VL - 1) / VL, begin, end);
    begin *= VL;
    end = std::min(end * VL, k);
    for (int64_t row = 0; row < m; ++row) widen_row(x + row * k + begin, end - begin, out + row * ldx + begin);
}

// How what is multiplied with the weights of a model of element type T is kept: as bfloat16 where that goes in pairs.
#if defined(LS_BF16_PAIRS)
template <class T> using Input = typename std::conditional<std::is_same<T, bf16>::value, bf16, float>::type;
#else
template <class T> using Input = float;
#endif

// Inputs in float32, for weights that are not in pairs (an odd depth has none): in a copy of this thread's own.
LS_INLINE const float* wide_rows(const float* x, int64_t, int64_t, int64_t) { return x; }
#if defined(LS_BF16_PAIRS)
static thread_local Scratch widened_rows;

LS_INLINE const float* wide_rows(const bf16* x, int64_t ldx, int64_t m, int64_t k) {
    float* wide = static_cast<float*>(widened_rows.reserve(size_t(m * ldx) * sizeof(float)));
    for (int64_t row = 0; row < m; ++row) widen_row(x + row * ldx, k, wide + row * ldx);
    return wide;
}
#endif

// multiply() for weights of any type; ldx is even where they are in pairs.
template <int UNIT, class A, class Store>
static void multiply_any(const Team& team, const A* x, int64_t ldx, int64_t m, const PackedWeight& weight,
                         Store&& store) {
#if defined(LS_BF16_PAIRS)
    if (std::is_same<A, bf16>::value && weight.dtype == BF16_PAIRS) {
        multiply<bf16_pair, UNIT>(team, reinterpret_cast<const bf16_pair*>(x), ldx / 2, m, weight, store);
        return;
    }
#endif
    const float* wide = wide_rows(x, ldx, m, weight.k);
    if (weight.dtype == F32)
        multiply<float, UNIT>(team, wide, ldx, m, weight, store);
    else if (weight.dtype == BF16)
        multiply<bf16, UNIT>(team, wide, ldx, m, weight, store);
    else
        multiply<f16, UNIT>(team, wide, ldx, m, weight, store);
}

// One panel of a result row, rounded to the element type; outputs past n do not exist.
template <class T> LS_INLINE void store_panel(T* row, int64_t first, int64_t n, vf low, vf high) {
    if (first + PANEL <= n) {
        vstore(row + first, low);
        vstore(row + first + VL, high);
        return;
    }
    T padded[PANEL];
    vstore(padded, low);
    vstore(padded + VL, high);
    memcpy(row + first, padded, size_t(n - first) * sizeof(T));
}

// Row stride of widened activations: rows at multiples of 4096 bytes would fall on the same cache sets.
LS_INLINE int64_t padded_stride(int64_t k) { return (k + VL - 1) / VL * VL + VL; }
