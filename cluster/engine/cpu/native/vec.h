// One vector type for AVX-512, AVX2 and everything else, and the conversions between the element types.
//
// A kernel written on these functions gives the same bits whatever part of a tile it computes: every operation
// works lane by lane, a multiply-add is always fused, and nothing is reordered (no fast-math).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define LS_INLINE static inline __attribute__((always_inline))

// BF16_PAIRS: weights only, bfloat16 in the order that the processor's dot product of pairs wants.
enum Dtype : int32_t { F32 = 0, BF16 = 1, F16 = 2, BF16_PAIRS = 3 };

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};
// Two bfloat16 values, of k and k + 1 (k even), the first in the lower half.
struct bf16_pair {
    uint32_t bits;
};

template <class T> constexpr Dtype dtype_of();
template <> constexpr Dtype dtype_of<float>() { return F32; }
template <> constexpr Dtype dtype_of<bf16>() { return BF16; }
template <> constexpr Dtype dtype_of<f16>() { return F16; }

// ---- scalar conversions -------------------------------------------------------------------------------------

LS_INLINE float to_float(float x) { return x; }

LS_INLINE float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

LS_INLINE bf16 to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fc0};  // NaN stays NaN
    return {uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

LS_INLINE float to_float(f16 x) {
    uint32_t sign = uint32_t(x.bits & 0x8000u) << 16, exponent = (x.bits >> 10) & 31u, mantissa = x.bits & 1023u;
    uint32_t bits;
    float y;
    if (exponent == 0) {  // zero and subnormals: the mantissa counts units of 2^-24
        y = float(mantissa) * 5.9604644775390625e-8f;
        memcpy(&bits, &y, 4);
        bits |= sign;
    } else {
        bits = sign | ((exponent == 31 ? 255u : exponent + 112u) << 23) | (mantissa << 13);
        if (exponent == 31 && mantissa) bits |= 1u << 22;
    }
    memcpy(&y, &bits, 4);
    return y;
}

LS_INLINE f16 to_f16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint16_t sign = uint16_t((bits >> 16) & 0x8000u);
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return {uint16_t(sign | 0x7e00u | ((bits >> 13) & 0x3ffu))};
    if (bits >= 0x47800000u) return {uint16_t(sign | 0x7c00u)};  // 65536 and more: infinity
    if (bits < 0x38800000u) {  // below 2^-14: adding 0.5 lets the float adder round to units of 2^-24
        float y;
        memcpy(&y, &bits, 4);
        y += 0.5f;
        uint32_t rounded;
        memcpy(&rounded, &y, 4);
        return {uint16_t(sign | (rounded - 0x3f000000u))};
    }
    bits += 0xfffu + ((bits >> 13) & 1u) - (112u << 23);
    return {uint16_t(sign | (bits >> 13))};
}

// ---- the vector ---------------------------------------------------------------------------------------------

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)

constexpr int VL = 16;
typedef __m512 vf;

LS_INLINE vf vload(const float* p) { return _mm512_loadu_ps(p); }
LS_INLINE void vstore(float* p, vf a) { _mm512_storeu_ps(p, a); }
LS_INLINE vf vset(float a) { return _mm512_set1_ps(a); }
LS_INLINE vf vadd(vf a, vf b) { return _mm512_add_ps(a, b); }
LS_INLINE vf vsub(vf a, vf b) { return _mm512_sub_ps(a, b); }
LS_INLINE vf vmul(vf a, vf b) { return _mm512_mul_ps(a, b); }
LS_INLINE vf vdiv(vf a, vf b) { return _mm512_div_ps(a, b); }
LS_INLINE vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
LS_INLINE vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
LS_INLINE vf vfma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
LS_INLINE vf vround(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
LS_INLINE vf vscale2(vf a, vf n) {  // a * 2^n for integral n in [-126, 127]
    __m512i e = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23);
    return _mm512_mul_ps(a, _mm512_castsi512_ps(e));
}
LS_INLINE vf vzero_if_less(vf a, vf x, vf limit) {  // 0 where x < limit, else (also for a NaN) a
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), a);
}
LS_INLINE vf vload(const bf16* p) {
    __m512i h = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(h, 16));
}
LS_INLINE vf vload(const f16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
LS_INLINE void vstore(bf16* p, vf a) {
    __m512i bits = _mm512_castps_si512(a);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff)), 16);
    rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(rounded));
}
LS_INLINE void vstore(f16* p, vf a) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// 2 * VL bf16 stored as pairs (j, j + VL): the low halves are lanes 0..VL-1, the high halves the next VL.
LS_INLINE void vload_pair(const bf16* p, vf& low, vf& high) {
    __m512i pair = _mm512_loadu_si512((const void*)p);
    low = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
    high = _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32(int(0xffff0000u))));
}

#if defined(__AVX512BF16__)
#define LS_BF16_PAIRS 1
typedef __m512i vpairs;
LS_INLINE vpairs vset(bf16_pair a) { return _mm512_set1_epi32(int(a.bits)); }
LS_INLINE void vload_pair(const bf16_pair* p, vpairs& low, vpairs& high) {
    low = _mm512_loadu_si512((const void*)p);
    high = _mm512_loadu_si512((const void*)(p + VL));
}
// c + both products of each pair; subnormal inputs count as zero.
LS_INLINE vf vfma(vpairs a, vpairs b, vf c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
LS_INLINE void vstore(bf16_pair* p, vpairs a) { _mm512_storeu_si512((void*)p, a); }
// Columns [from, from + 2 * VL) of two rows as pairs, zero from column `end` on; a row that is null counts as zeros.
LS_INLINE void vzip(const bf16* const (&rows)[2], int64_t from, int64_t end, vpairs& low, vpairs& high) {
    const __mmask32 present = end - from < 2 * VL ? (__mmask32(1) << (end - from)) - 1 : ~__mmask32(0);
    const __m512i a = _mm512_maskz_loadu_epi16(rows[0] ? present : 0, rows[0] + from);
    const __m512i b = _mm512_maskz_loadu_epi16(rows[1] ? present : 0, rows[1] + from);
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i pick = _mm512_add_epi32(lane, _mm512_slli_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(32)), 16));
    low = _mm512_permutex2var_epi16(a, pick, b);
    high = _mm512_permutex2var_epi16(a, _mm512_add_epi32(pick, _mm512_set1_epi32(16 << 16 | 16)), b);
}
#endif

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

constexpr int VL = 8;
typedef __m256 vf;

LS_INLINE vf vload(const float* p) { return _mm256_loadu_ps(p); }
LS_INLINE void vstore(float* p, vf a) { _mm256_storeu_ps(p, a); }
LS_INLINE vf vset(float a) { return _mm256_set1_ps(a); }
LS_INLINE vf vadd(vf a, vf b) { return _mm256_add_ps(a, b); }
LS_INLINE vf vsub(vf a, vf b) { return _mm256_sub_ps(a, b); }
LS_INLINE vf vmul(vf a, vf b) { return _mm256_mul_ps(a, b); }
LS_INLINE vf vdiv(vf a, vf b) { return _mm256_div_ps(a, b); }
LS_INLINE vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
LS_INLINE vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
LS_INLINE vf vfma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
LS_INLINE vf vround(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
LS_INLINE vf vscale2(vf a, vf n) {
    __m256i e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(a, _mm256_castsi256_ps(e));
}
LS_INLINE vf vzero_if_less(vf a, vf x, vf limit) {
    return _mm256_and_ps(a, _mm256_cmp_ps(x, limit, _CMP_NLT_UQ));
}
LS_INLINE vf vload(const bf16* p) {
    __m256i h = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(h, 16));
}
LS_INLINE vf vload(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
LS_INLINE void vstore(bf16* p, vf a) {
    __m256i bits = _mm256_castps_si256(a);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff)), 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
    _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
}
LS_INLINE void vstore(f16* p, vf a) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
LS_INLINE void vload_pair(const bf16* p, vf& low, vf& high) {
    __m256i pair = _mm256_loadu_si256((const __m256i*)p);
    low = _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16));
    high = _mm256_castsi256_ps(_mm256_and_si256(pair, _mm256_set1_epi32(int(0xffff0000u))));
}

#else  // any other processor: the compiler's own vectors, eight lanes

constexpr int VL = 8;
typedef float vf __attribute__((vector_size(32)));
typedef int32_t vi __attribute__((vector_size(32)));

LS_INLINE vf vload(const float* p) {
    vf a;
    memcpy(&a, p, sizeof a);
    return a;
}
LS_INLINE void vstore(float* p, vf a) { memcpy(p, &a, sizeof a); }
LS_INLINE vf vset(float a) { return vf{a, a, a, a, a, a, a, a}; }
LS_INLINE vf vadd(vf a, vf b) { return a + b; }
LS_INLINE vf vsub(vf a, vf b) { return a - b; }
LS_INLINE vf vmul(vf a, vf b) { return a * b; }
LS_INLINE vf vdiv(vf a, vf b) { return a / b; }
LS_INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
LS_INLINE vf vmin(vf a, vf b) { return a < b ? a : b; }
LS_INLINE vf vfma(vf a, vf b, vf c) {  // one rounding where the processor can, and everywhere the same
    vf r;
    for (int i = 0; i < VL; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return r;
}
LS_INLINE vf vround(vf a) {
    vf r;
    for (int i = 0; i < VL; ++i) r[i] = __builtin_rintf(a[i]);
    return r;
}
LS_INLINE vf vscale2(vf a, vf n) {
    vi e = (__builtin_convertvector(n, vi) + 127) << 23;
    vf p;
    memcpy(&p, &e, sizeof p);
    return a * p;
}
LS_INLINE vf vzero_if_less(vf a, vf x, vf limit) { return x < limit ? vset(0.0f) : a; }
template <class T> LS_INLINE vf vload(const T* p) {
    vf a;
    for (int i = 0; i < VL; ++i) a[i] = to_float(p[i]);
    return a;
}
LS_INLINE void vstore(bf16* p, vf a) {
    for (int i = 0; i < VL; ++i) p[i] = to_bf16(a[i]);
}
LS_INLINE void vstore(f16* p, vf a) {
    for (int i = 0; i < VL; ++i) p[i] = to_f16(a[i]);
}
LS_INLINE void vload_pair(const bf16* p, vf& low, vf& high) {
    for (int i = 0; i < VL; ++i) {
        low[i] = to_float(p[2 * i]);
        high[i] = to_float(p[2 * i + 1]);
    }
}

#endif

#if defined(__AVX2__)
LS_INLINE __m256 load8(const float* p) { return _mm256_loadu_ps(p); }
LS_INLINE __m256 load8(const bf16* p) {
    __m256i h = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(h, 16));
}
LS_INLINE __m256 load8(const f16* p) {
#if defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    float wide[8];
    for (int i = 0; i < 8; ++i) wide[i] = to_float(p[i]);
    return _mm256_loadu_ps(wide);
#endif
}
#endif

// ---- two vectors of a weight panel --------------------------------------------------------------------------

LS_INLINE void vload_pair(const float* p, vf& low, vf& high) {
    low = vload(p);
    high = vload(p + VL);
}
LS_INLINE void vload_pair(const f16* p, vf& low, vf& high) {
    low = vload(p);
    high = vload(p + VL);
}

// Columns [from, from + 2 * VL) of a row, zero from column `end` on.
template <class T> LS_INLINE void vzip(const T* const (&rows)[1], int64_t from, int64_t end, vf& low, vf& high) {
    T padded[2 * VL] = {};
    const T* at = rows[0] + from;
    if (end - from < 2 * VL) at = static_cast<const T*>(memcpy(padded, at, size_t(end - from) * sizeof(T)));
    low = vload(at);
    high = vload(at + VL);
}

// ---- built on the above -------------------------------------------------------------------------------------

LS_INLINE void store_one(float* p, float a) { *p = a; }
LS_INLINE void store_one(bf16* p, float a) { *p = to_bf16(a); }
LS_INLINE void store_one(f16* p, float a) { *p = to_f16(a); }

// Rounding to the element type and back, as happens between two operations of the unfused model.
template <class T> LS_INLINE vf vround_to(vf a) {
    if (std::is_same<T, float>::value) return a;
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
    if (std::is_same<T, bf16>::value) {
        __m512i bits = _mm512_castps_si512(a), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        bits = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff));
        vf rounded = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(int(0xffff0000u))));
        return _mm512_mask_mov_ps(rounded, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a);
    }
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
    if (std::is_same<T, bf16>::value) {
        __m256i bits = _mm256_castps_si256(a), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        bits = _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff));
        vf rounded = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(int(0xffff0000u))));
        return _mm256_blendv_ps(rounded, a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    }
#endif
    T stored[VL];
    vstore(stored, a);
    return vload(stored);
}

template <class T> LS_INLINE float round_to(float a) {
    T stored;
    store_one(&stored, a);
    return to_float(stored);
}

// The lanes added up in an order that never changes.
LS_INLINE float vsum(vf a) {
    float lane[VL];
    vstore(lane, a);
#pragma GCC unroll 4
    for (int half = VL / 2; half; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
    return lane[0];
}

LS_INLINE float vmaximum(vf a) {
    float lane[VL];
    vstore(lane, a);
#pragma GCC unroll 4
    for (int half = VL / 2; half; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; ++i) lane[i] = lane[i + half] > lane[i] ? lane[i + half] : lane[i];
    return lane[0];
}

// e^x with a relative error below 2e-7 for x up to 88, where it stops growing; exactly 1 at 0, exactly 0 from -87.3 down
// (also at -infinity). NaN stays.
LS_INLINE vf vexp(vf x) {
    const vf lowest = vset(-87.33654f);
    vf clamped = vmin(vset(88.0f), x);  // this order of operands lets a NaN through
    clamped = vmax(lowest, clamped);
    vf n = vround(vmul(clamped, vset(1.44269504f)));
    vf r = vfma(n, vset(-0.693359375f), clamped);
    r = vfma(n, vset(2.12194440e-4f), r);
    vf p = vset(1.9875691500e-4f);
    p = vfma(p, r, vset(1.3981999507e-3f));
    p = vfma(p, r, vset(8.3334519073e-3f));
    p = vfma(p, r, vset(4.1665795894e-2f));
    p = vfma(p, r, vset(1.6666665459e-1f));
    p = vfma(p, r, vset(5.0000001201e-1f));
    p = vadd(vfma(vmul(r, r), p, r), vset(1.0f));
    return vzero_if_less(vscale2(p, n), x, lowest);
}
