// Between a row-major weight [n, k] and the panels of gemm.h. Both directions copy bits, so unpacking is exact.
#pragma once

#include "gemm.h"

// Where lane j of a panel is kept within its group of PANEL elements: 16-bit pairs (j, j + VL) for bfloat16.
template <class W> LS_INLINE int lane_slot(int lane) {
    if (!std::is_same<W, bf16>::value) return lane;
    return lane < VL ? 2 * lane : 2 * (lane - VL) + 1;
}

// Copies rows of `matrix` to (or from) panels: row r goes to panel offset + (r / PANEL) * step, lane r % PANEL.
template <class W, bool TO_PANELS>
static void move_panels(int threads, W* matrix, int64_t rows, int64_t k, W* packed, int64_t offset, int64_t step) {
    constexpr int64_t DEPTH = 64;  // so that a line of the panel is complete before it leaves the cache
    parallel(threads, [&](Team team) {
        int64_t begin, end;
        team.share((rows + PANEL - 1) / PANEL, begin, end);
        for (int64_t p = begin; p < end; ++p) {
            W* panel = packed + (offset + p * step) * k * PANEL;
            const int64_t count = std::min<int64_t>(PANEL, rows - p * PANEL);
            for (int64_t from = 0; from < k; from += DEPTH) {
                const int64_t to = std::min(from + DEPTH, k);
                for (int lane = 0; lane < PANEL; ++lane) {
                    const int slot = lane_slot<W>(lane);
                    W* row = matrix + (p * PANEL + lane) * k;
                    for (int64_t i = from; i < to; ++i) {
                        if (!TO_PANELS && lane < count) row[i] = panel[i * PANEL + slot];
                        if (TO_PANELS) panel[i * PANEL + slot] = lane < count ? row[i] : W{};
                    }
                }
            }
        }
    });
}

// The same for bfloat16 in pairs; k is even.
template <bool TO_PANELS>
static void move_pairs(int threads, bf16* matrix, int64_t rows, int64_t k, bf16* packed, int64_t offset, int64_t step) {
    constexpr int64_t DEPTH = 64;
    parallel(threads, [&](Team team) {
        int64_t begin, end;
        team.share((rows + PANEL - 1) / PANEL, begin, end);
        for (int64_t p = begin; p < end; ++p) {
            bf16* panel = packed + (offset + p * step) * k * PANEL;
            const int64_t count = std::min<int64_t>(PANEL, rows - p * PANEL);
            for (int64_t from = 0; from < k; from += DEPTH) {
                const int64_t to = std::min(from + DEPTH, k);
                for (int lane = 0; lane < PANEL; ++lane) {
                    bf16* row = matrix + (p * PANEL + lane) * k;
                    for (int64_t i = from; i < to; ++i) {
                        bf16& slot = panel[(i / 2 * PANEL + lane) * 2 + i % 2];
                        if (!TO_PANELS && lane < count) row[i] = slot;
                        if (TO_PANELS) slot = lane < count ? row[i] : bf16{};
                    }
                }
            }
        }
    });
}

template <bool TO_PANELS>
static void move_panels_any(int threads, int dtype, void* matrix, int64_t rows, int64_t k, void* packed,
                            int64_t offset, int64_t step) {
    if (dtype == F32)
        move_panels<float, TO_PANELS>(threads, (float*)matrix, rows, k, (float*)packed, offset, step);
    else if (dtype == BF16_PAIRS)
        move_pairs<TO_PANELS>(threads, (bf16*)matrix, rows, k, (bf16*)packed, offset, step);
    else if (dtype == BF16)
        move_panels<bf16, TO_PANELS>(threads, (bf16*)matrix, rows, k, (bf16*)packed, offset, step);
    else
        move_panels<f16, TO_PANELS>(threads, (f16*)matrix, rows, k, (f16*)packed, offset, step);
}
