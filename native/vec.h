// Sixteen floats at a time, with the same rounding in every instruction set.
//
// Each operation acts on its lane alone and is rounded once, so AVX-512, AVX2 and plain C++ agree
// bit for bit. Sums over lanes go in one fixed order: halves, quarters, eighths, pairs.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace outpace {
namespace {  // a copy for each instruction set: the linker must not merge them

constexpr int kLanes = 16;

inline void fetch_line(const void* p) {
#if defined(__GNUC__)
    __builtin_prefetch(p);
#else
    (void)p;
#endif
}

#if defined(__AVX512F__)

struct Vec {
    __m512 v;
};

inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline Vec splat(float x) { return {_mm512_set1_ps(x)}; }
inline Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec abs(Vec a) { return {_mm512_abs_ps(a.v)}; }
inline Vec nearest(Vec a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// 2^n for whole n in [-126, 127].
inline Vec power_of_two(Vec n) {
    const __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23))};
}
inline Vec from_int(const int32_t* p) { return {_mm512_cvtepi32_ps(_mm512_loadu_si512(p))}; }
inline Vec from_difference(const int32_t* p, const int32_t* q) {
    return {_mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_loadu_si512(p), _mm512_loadu_si512(q)))};
}
// a where x > limit, else 0.
inline Vec where_above(Vec a, Vec x, Vec limit) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_GT_OQ), a.v)};
}
// Lane i takes lane i ^ distance.
template <int distance>
inline Vec swapped(Vec a) {
    if constexpr (distance == 8) return {_mm512_shuffle_f32x4(a.v, a.v, 0x4e)};
    if constexpr (distance == 4) return {_mm512_shuffle_f32x4(a.v, a.v, 0xb1)};
    if constexpr (distance == 2) return {_mm512_permute_ps(a.v, 0x4e)};
    if constexpr (distance == 1) return {_mm512_permute_ps(a.v, 0xb1)};
}
inline Vec from_int8(const int8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
}
// Numbers in [-127, 127] to bytes, rounded to nearest, the even one of two.
inline void store_int8(int8_t* p, Vec a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
inline float sum(Vec a) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v),
                                       _mm512_extractf32x8_ps(a.v, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

#elif defined(__AVX2__)

struct Vec {
    __m256 lo, hi;
};

inline Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Vec a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
inline Vec splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Vec fma(Vec a, Vec b, Vec c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline Vec abs(Vec a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
inline Vec nearest(Vec a) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}
inline __m256 power_of_two(__m256 n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
inline Vec power_of_two(Vec n) { return {power_of_two(n.lo), power_of_two(n.hi)}; }
inline __m256i load_int(const int32_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline Vec from_int(const int32_t* p) {
    return {_mm256_cvtepi32_ps(load_int(p)), _mm256_cvtepi32_ps(load_int(p + 8))};
}
inline Vec from_difference(const int32_t* p, const int32_t* q) {
    return {_mm256_cvtepi32_ps(_mm256_sub_epi32(load_int(p), load_int(q))),
            _mm256_cvtepi32_ps(_mm256_sub_epi32(load_int(p + 8), load_int(q + 8)))};
}
inline Vec where_above(Vec a, Vec x, Vec limit) {
    return {_mm256_and_ps(a.lo, _mm256_cmp_ps(x.lo, limit.lo, _CMP_GT_OQ)),
            _mm256_and_ps(a.hi, _mm256_cmp_ps(x.hi, limit.hi, _CMP_GT_OQ))};
}
template <int distance>
inline Vec swapped(Vec a) {
    if constexpr (distance == 8) return {a.hi, a.lo};
    if constexpr (distance == 4)
        return {_mm256_permute2f128_ps(a.lo, a.lo, 1), _mm256_permute2f128_ps(a.hi, a.hi, 1)};
    if constexpr (distance == 2)
        return {_mm256_permute_ps(a.lo, 0x4e), _mm256_permute_ps(a.hi, 0x4e)};
    if constexpr (distance == 1)
        return {_mm256_permute_ps(a.lo, 0xb1), _mm256_permute_ps(a.hi, 0xb1)};
}
inline Vec from_int8(const int8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
inline void store_int8(int8_t* p, Vec a) {
    const __m256i words = _mm256_permute4x64_epi64(
        _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)), 0xd8);
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(p),
        _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
inline float sum(Vec a) {
    const __m256 eight = _mm256_add_ps(a.lo, a.hi);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

#else

struct Vec {
    float v[kLanes];
};

template <class F>
inline Vec each(F f) {
    Vec r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = f(i);
    return r;
}
inline Vec load(const float* p) {
    return each([&](int i) { return p[i]; });
}
inline void store(float* p, Vec a) { std::memcpy(p, a.v, sizeof a.v); }
inline Vec splat(float x) {
    return each([&](int) { return x; });
}
inline Vec add(Vec a, Vec b) {
    return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline Vec sub(Vec a, Vec b) {
    return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline Vec mul(Vec a, Vec b) {
    return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline Vec div(Vec a, Vec b) {
    return each([&](int i) { return a.v[i] / b.v[i]; });
}
inline Vec fma(Vec a, Vec b, Vec c) {
    return each([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
}
inline Vec max(Vec a, Vec b) {  // of NaN the second, like the instruction
    return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Vec min(Vec a, Vec b) {
    return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline Vec abs(Vec a) {
    return each([&](int i) { return std::fabs(a.v[i]); });
}
inline Vec nearest(Vec a) {
    return each([&](int i) { return std::nearbyint(a.v[i]); });
}
inline Vec power_of_two(Vec n) {
    return each([&](int i) {
        const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n.v[i]) + 127) << 23;
        float x;
        std::memcpy(&x, &bits, sizeof x);
        return x;
    });
}
inline Vec from_int(const int32_t* p) {
    return each([&](int i) { return static_cast<float>(p[i]); });
}
inline Vec from_difference(const int32_t* p, const int32_t* q) {
    return each([&](int i) { return static_cast<float>(p[i] - q[i]); });
}
inline Vec where_above(Vec a, Vec x, Vec limit) {
    return each([&](int i) { return x.v[i] > limit.v[i] ? a.v[i] : 0.0f; });
}
template <int distance>
inline Vec swapped(Vec a) {
    return each([&](int i) { return a.v[i ^ distance]; });
}
inline Vec from_int8(const int8_t* p) {
    return each([&](int i) { return static_cast<float>(p[i]); });
}
inline void store_int8(int8_t* p, Vec a) {
    for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(std::nearbyint(a.v[i]));
}
inline float sum(Vec a) {
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) a.v[i] += a.v[i + half];
    return a.v[0];
}

#endif

// The largest lane; a maximum does not depend on the order.
inline float largest(Vec a) {
    float lanes[kLanes];
    store(lanes, a);
    float m = lanes[0];
    for (int i = 1; i < kLanes; ++i) m = lanes[i] > m ? lanes[i] : m;
    return m;
}

// e^x within 2 units in the last place; 0 below -87.3. Coefficients of Cephes' expf.
inline Vec exp(Vec x) {
    const Vec lowest = splat(-87.3f);
    const Vec inside = min(max(x, lowest), splat(88.0f));  // a NaN becomes the lowest
    const Vec n = nearest(mul(inside, splat(1.44269504088896341f)));
    Vec r = fma(n, splat(-0.693359375f), inside);
    r = fma(n, splat(2.12194440e-4f), r);
    Vec p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, mul(r, r), add(r, splat(1.0f)));
    return where_above(mul(p, power_of_two(n)), x, lowest);
}

// x / (1 + e^-x)
inline Vec silu(Vec x) {
    return div(x, add(splat(1.0f), exp(sub(splat(0.0f), x))));
}

}  // namespace
}  // namespace outpace
