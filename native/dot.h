// Exact integer products of packed weights with quantised rows, for each instruction set.
//
// Weights lie in strips of 32 outputs: [k / 4][32][4] bytes, so that one 64-byte load holds four
// inputs of 16 outputs, and 16 of them 128 bytes apart are one AMX tile. Rows hold bytes q + 128,
// so some instruction sets sum 128 times the weights too much (`kBiased`), which is exact to undo.
#pragma once

#include <cstdint>
#include <cstring>

#include "vec.h"

namespace outpace {
namespace {

constexpr int kStrip = 32;
constexpr int kAhead = 4096;  // bytes

#if defined(_MSC_VER)
#define OUTPACE_INLINE __forceinline
#else
#define OUTPACE_INLINE inline __attribute__((always_inline))
#endif

// One row's results for one strip.
struct Sums {
    alignas(64) int32_t v[kStrip];
};

#if defined(__AVX512VNNI__)

// Asks for weights before they are needed: the processor's own guesses end at every page.
template <int lines>
OUTPACE_INLINE void fetch(const int8_t* weights) {
    for (int i = 0; i < lines; ++i) _mm_prefetch(weights + kAhead + 64 * i, _MM_HINT_T0);
}

inline __m512i splat4(const uint8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    return _mm512_set1_epi32(four);
}

// Sums of `rows` rows with 32 outputs, in two halves of the inputs so that none waits for itself.
// Members instead of an array, which compilers would keep in memory.
template <int rows>
struct Tile {
    __m512i low = _mm512_setzero_si512(), high = low, low2 = low, high2 = low;
    Tile<rows - 1> rest;

    OUTPACE_INLINE void step(__m512i w0, __m512i w1, const uint8_t* x, int stride) {
        const __m512i four = splat4(x);
        low = _mm512_dpbusd_epi32(low, four, w0);
        high = _mm512_dpbusd_epi32(high, four, w1);
        rest.step(w0, w1, x + stride, stride);
    }
    OUTPACE_INLINE void step2(__m512i w0, __m512i w1, const uint8_t* x, int stride) {
        const __m512i four = splat4(x);
        low2 = _mm512_dpbusd_epi32(low2, four, w0);
        high2 = _mm512_dpbusd_epi32(high2, four, w1);
        rest.step2(w0, w1, x + stride, stride);
    }
    OUTPACE_INLINE void store(Sums* sums) const {
        _mm512_store_si512(sums->v, _mm512_add_epi32(low, low2));
        _mm512_store_si512(sums->v + 16, _mm512_add_epi32(high, high2));
        rest.store(sums + 1);
    }
};

template <>
struct Tile<0> {
    OUTPACE_INLINE void step(__m512i, __m512i, const uint8_t*, int) {}
    OUTPACE_INLINE void step2(__m512i, __m512i, const uint8_t*, int) {}
    OUTPACE_INLINE void store(Sums*) const {}
};

template <int rows>
inline void dot_rows(const int8_t* strip, const uint8_t* x, int stride, int k, Sums* sums) {
    Tile<rows> tile;
    for (int i = 0; i < k; i += 8, strip += 256) {
        fetch<4>(strip);
        const __m512i w0 = _mm512_load_si512(strip), w1 = _mm512_load_si512(strip + 64);
        tile.step(w0, w1, x + i, stride);
        const __m512i w2 = _mm512_load_si512(strip + 128), w3 = _mm512_load_si512(strip + 192);
        if constexpr (rows <= 4)
            tile.step2(w2, w3, x + i + 4, stride);
        else
            tile.step(w2, w3, x + i + 4, stride);
    }
    tile.store(sums);
}

inline void dot_few(const int8_t* strip, const uint8_t* x, int stride, int k, int rows,
                    Sums* sums) {
    switch (rows) {
#define OUTPACE_ROWS(n) \
    case n: return dot_rows<n>(strip, x, stride, k, sums);
        OUTPACE_ROWS(1) OUTPACE_ROWS(2) OUTPACE_ROWS(3) OUTPACE_ROWS(4) OUTPACE_ROWS(5)
        OUTPACE_ROWS(6) OUTPACE_ROWS(7) OUTPACE_ROWS(8) OUTPACE_ROWS(9) OUTPACE_ROWS(10)
        OUTPACE_ROWS(11) OUTPACE_ROWS(12)
#undef OUTPACE_ROWS
    }
}

constexpr bool kBiased = true;
constexpr int kMaxFew = 12;

#if defined(__AMX_INT8__)

constexpr int kMaxRows = 32;
constexpr int kFewRows = 4;  // below, loading whole tiles of rows costs more than it saves

// Eight tiles of 16 rows of 64 bytes; a thread sets them up before it multiplies.
inline void enter() {
    struct alignas(64) {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } layout;
    _tile_loadconfig(&layout);
}
inline void leave() { _tile_release(); }

// Reads whole tiles: rows past the last belong to the buffer, their sums to nobody.
inline void dot(const int8_t* strip, const uint8_t* x, int stride, int k, int rows, Sums* sums) {
    if (rows <= kFewRows) return dot_few(strip, x, stride, k, rows, sums);
    _tile_zero(0);
    _tile_zero(1);
    if (rows <= 16) {
        for (int i = 0; i < k; i += 64, strip += 2048) {
            fetch<32>(strip);
            _tile_loadd(4, x + i, stride);
            _tile_loadd(6, strip, 128);
            _tile_loadd(7, strip + 64, 128);
            _tile_dpbusd(0, 4, 6);
            _tile_dpbusd(1, 4, 7);
        }
    } else {
        _tile_zero(2);
        _tile_zero(3);
        for (int i = 0; i < k; i += 64, strip += 2048) {
            fetch<32>(strip);
            _tile_loadd(4, x + i, stride);
            _tile_loadd(6, strip, 128);
            _tile_loadd(7, strip + 64, 128);
            _tile_loadd(5, x + 16 * stride + i, stride);
            _tile_dpbusd(0, 4, 6);
            _tile_dpbusd(1, 4, 7);
            _tile_dpbusd(2, 5, 6);
            _tile_dpbusd(3, 5, 7);
        }
        _tile_stored(2, sums[16].v, sizeof(Sums));
        _tile_stored(3, sums[16].v + 16, sizeof(Sums));
    }
    _tile_stored(0, sums[0].v, sizeof(Sums));
    _tile_stored(1, sums[0].v + 16, sizeof(Sums));
}

#else

constexpr int kMaxRows = kMaxFew;

#endif

#elif defined(__AVX2__)

// Four products of bytes added to each of eight sums; |w| <= 127 and |q| <= 127 cannot saturate.
inline __m256i dot_step(__m256i sum, __m256i biased, __m256i w) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(sum, biased, w);
#else
    const __m256i q = _mm256_xor_si256(biased, _mm256_set1_epi8(-128));
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(q, w));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

#if defined(__AVXVNNI__)
constexpr bool kBiased = true;
#else
constexpr bool kBiased = false;
#endif

template <int rows>
inline void dot_rows(const int8_t* strip, const uint8_t* x, int stride, int k, Sums* sums) {
    __m256i a[rows][4];
    for (int r = 0; r < rows; ++r)
        for (int j = 0; j < 4; ++j) a[r][j] = _mm256_setzero_si256();
    for (int i = 0; i < k; i += 4, strip += 128) {
        const auto* w = reinterpret_cast<const __m256i*>(strip);
        for (int r = 0; r < rows; ++r) {
            int32_t four;
            std::memcpy(&four, x + r * stride + i, 4);
            const __m256i b = _mm256_set1_epi32(four);
            for (int j = 0; j < 4; ++j)
                a[r][j] = dot_step(a[r][j], b, _mm256_load_si256(w + j));
        }
    }
    for (int r = 0; r < rows; ++r)
        for (int j = 0; j < 4; ++j)
            _mm256_store_si256(reinterpret_cast<__m256i*>(sums[r].v + 8 * j), a[r][j]);
}

constexpr int kMaxFew = 3;
constexpr int kMaxRows = kMaxFew;

inline void dot_few(const int8_t* strip, const uint8_t* x, int stride, int k, int rows, Sums* sums) {
    switch (rows) {
        case 1: return dot_rows<1>(strip, x, stride, k, sums);
        case 2: return dot_rows<2>(strip, x, stride, k, sums);
        case 3: return dot_rows<3>(strip, x, stride, k, sums);
    }
}

#else

constexpr bool kBiased = false;
constexpr int kMaxFew = 1;
constexpr int kMaxRows = kMaxFew;

inline void dot_few(const int8_t* strip, const uint8_t* x, int, int k, int, Sums* sums) {
    std::memset(sums, 0, sizeof *sums);
    for (int i = 0; i < k; i += 4, strip += 128)
        for (int o = 0; o < kStrip; ++o)
            for (int j = 0; j < 4; ++j)
                sums->v[o] += strip[4 * o + j] * (static_cast<int32_t>(x[i + j]) - 128);
}

#endif

#if !defined(__AMX_INT8__)
inline void enter() {}
inline void leave() {}
inline void dot(const int8_t* strip, const uint8_t* x, int stride, int k, int rows, Sums* sums) {
    dot_few(strip, x, stride, k, rows, sums);
}
#endif

// What `dot` summed, as floats; `offsets` are 128 times the sum of each output's weights.
inline Vec products(const int32_t* sums, const int32_t* offsets) {
    return kBiased ? from_difference(sums, offsets) : from_int(sums);
}

}  // namespace
}  // namespace outpace
