// CPU kernels of the engine: a plain C interface, loaded with ctypes. All pointers are to contiguous memory.
#include "attention.h"
#include "gemm.h"
#include "layer.h"
#include "pack.h"

static thread_local Scratch activations;

template <class T> static void linear(const PackedWeight& weight, const T* x, int64_t m, T* y, int threads) {
    using A = Input<T>;
    const bool in_place = std::is_same<T, A>::value && (m == 1 || weight.k % 512 != 0);
    const int64_t ldx = in_place ? weight.k : padded_stride(weight.k);
    A* copy = in_place ? nullptr : static_cast<A*>(activations.reserve(size_t(m * ldx) * sizeof(A)));
    parallel(threads, [&](Team team) {
        if (!in_place) {
            widen(team, x, m, weight.k, copy, ldx);
            team.barrier();
        }
        const A* from = in_place ? reinterpret_cast<const A*>(x) : copy;
        multiply_any<1>(team, from, ldx, m, weight, [&](int64_t row, int64_t panel, const float* results) {
            vf low = vload(results), high = vload(results + VL);
            add_bias(weight, panel, low, high);
            store_panel(y + row * weight.n, panel * PANEL, weight.n, low, high);
        });
    });
}

extern "C" {

int64_t ls_panel(void) { return PANEL; }

// Whether weights may be BF16_PAIRS.
int ls_multiplies_pairs(void) {
#if defined(LS_BF16_PAIRS)
    return 1;
#else
    return 0;
#endif
}

void ls_pack(int dtype, void* matrix, int64_t rows, int64_t k, void* packed, int64_t offset, int64_t step,
             int threads) {
    move_panels_any<true>(threads, dtype, matrix, rows, k, packed, offset, step);
}

void ls_unpack(int dtype, void* matrix, int64_t rows, int64_t k, void* packed, int64_t offset, int64_t step,
               int threads) {
    move_panels_any<false>(threads, dtype, matrix, rows, k, packed, offset, step);
}

void ls_linear(const PackedWeight* weight, int dtype, const void* x, int64_t m, void* y, int threads) {
    if (dtype == F32)
        linear(*weight, static_cast<const float*>(x), m, static_cast<float*>(y), threads);
    else if (dtype == BF16)
        linear(*weight, static_cast<const bf16*>(x), m, static_cast<bf16*>(y), threads);
    else
        linear(*weight, static_cast<const f16*>(x), m, static_cast<f16*>(y), threads);
}

int64_t ls_plan(const Step* step, const uint8_t* ancestors, const int64_t* offsets) {
    return plan(*step, ancestors, offsets);
}

void ls_attention(const Attention* call, const Step* step, int threads) {
    if (call->dtype == F32)
        attention<float>(*call, *step, threads);
    else if (call->dtype == BF16)
        attention<bf16>(*call, *step, threads);
    else
        attention<f16>(*call, *step, threads);
}

// `layers` are of one element type.
void ls_layers(const Layer* const* layers, const LayerCall* calls, int64_t count, const Step* step, int threads) {
    if (layers[0]->dtype == F32)
        run_layers<float>(layers, calls, count, *step, threads);
    else if (layers[0]->dtype == BF16)
        run_layers<bf16>(layers, calls, count, *step, threads);
    else
        run_layers<f16>(layers, calls, count, *step, threads);
}
}
