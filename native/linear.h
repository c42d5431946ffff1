// Rows through packed matrices: normalise, rotate, quantise, multiply.
#pragma once

#include "dot.h"
#include "model.h"
#include "pool.h"

namespace outpace {
namespace {

constexpr int kBlock = 64;  // inputs that one rotation mixes; packing rotates the weights alike

// Root mean square norm over n of `padded` numbers; the others are zeros and stay so.
inline void normalise(const float* x, const float* weight, int n, int padded, float eps,
                      float* out) {
    Vec squares = splat(0.0f);
    for (int i = 0; i < padded; i += kLanes) {
        const Vec v = load(x + i);
        squares = fma(v, v, squares);
    }
    const Vec factor = splat(1.0f / std::sqrt(sum(squares) / static_cast<float>(n) + eps));
    for (int i = 0; i < padded; i += kLanes)
        store(out + i, mul(load(weight + i), mul(load(x + i), factor)));
}

template <int distance>
struct Signs {
    alignas(64) float v[kLanes] = {};
    constexpr Signs() {
        for (int i = 0; i < kLanes; ++i) v[i] = (i & distance) ? -1.0f : 1.0f;
    }
};

// Lanes i and i + distance become their sum and their difference.
template <int distance>
inline Vec butterfly(Vec a) {
    static constexpr Signs<distance> signs;
    return fma(load(signs.v), a, swapped<distance>(a));
}

// Hadamard's matrix times each block of 16 * count numbers: no single one stands out afterwards.
template <int count>
inline void rotate_block(float* x) {
    Vec a[count];
    for (int i = 0; i < count; ++i)
        a[i] = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(load(x + kLanes * i)))));
    for (int distance = 1; distance < count; distance *= 2)
        for (int i = 0; i < count; ++i)
            if ((i & distance) == 0) {
                const Vec low = a[i], high = a[i + distance];
                a[i] = add(low, high);
                a[i + distance] = sub(low, high);
            }
    for (int i = 0; i < count; ++i) store(x + kLanes * i, a[i]);
}

inline void rotate(float* x, int n, int block) {
    for (int i = 0; i < n; i += block) {
        if (block == 64)
            rotate_block<4>(x + i);
        else if (block == 32)
            rotate_block<2>(x + i);
        else
            rotate_block<1>(x + i);
    }
}

// n numbers to bytes in [-127, 127] and the scale that undoes it; NaN where a number is not finite.
inline float quantise(const float* x, int n, int8_t* q) {
    Vec top = splat(0.0f), broken = splat(0.0f);
    for (int i = 0; i < n; i += kLanes) {
        const Vec v = load(x + i);
        top = max(abs(v), top);
        broken = fma(v, splat(0.0f), broken);
    }
    const float amax = largest(top);
    const Vec inverse = splat(amax > 1e-30f ? 127.0f / amax : 0.0f);
    for (int i = 0; i < n; i += kLanes) {
        const Vec v = mul(load(x + i), inverse);
        store_int8(q + i, min(max(v, splat(-127.0f)), splat(127.0f)));
    }
    return amax / 127.0f + sum(broken);
}

inline void bias_bytes(const int8_t* q, int n, uint8_t* out) {
    for (int i = 0; i < n; ++i) out[i] = static_cast<uint8_t>(q[i]) ^ 0x80;
}

// One row ready for a matrix; x is rotated in place.
inline float prepare(float* x, int n, uint8_t* out) {
    rotate(x, n, kBlock);
    const float scale = quantise(x, n, reinterpret_cast<int8_t*>(out));
    bias_bytes(reinterpret_cast<const int8_t*>(out), n, out);
    return scale;
}

// Worker w's share of n things.
struct Share {
    int begin, end;
    Share(int n, int worker, int workers)
        : begin(static_cast<int>(static_cast<int64_t>(n) * worker / workers)),
          end(static_cast<int>(static_cast<int64_t>(n) * (worker + 1) / workers)) {}
};

// Multiplies rows with the strips of a share and hands each result to
// emit(row, strip, first 16 outputs, last 16 outputs).
template <class Emit>
inline void multiply(const Linear& m, const uint8_t* x, const float* scales, int rows, Share strips,
                     Emit emit) {
    Sums sums[kMaxRows];
    const int tiles = (rows + kMaxRows - 1) / kMaxRows;
    for (int strip = strips.begin; strip < strips.end; ++strip) {
        const int8_t* weights = m.weights + static_cast<size_t>(strip) * kStrip * m.inputs;
        const int at = strip * kStrip;
        const Vec scale0 = load(m.scales + at), scale1 = load(m.scales + at + kLanes);
        for (int tile = 0; tile < tiles; ++tile) {
            const int first = kMaxRows * tile;
            const int count = rows - first < kMaxRows ? rows - first : kMaxRows;
            dot(weights, x + static_cast<size_t>(first) * m.inputs, m.inputs, m.inputs, count, sums);
            for (int r = 0; r < count; ++r) {
                const Vec scale = splat(scales[first + r]);
                Vec y0 = mul(mul(products(sums[r].v, m.offsets + at), scale0), scale);
                Vec y1 = mul(mul(products(sums[r].v + kLanes, m.offsets + at + kLanes), scale1), scale);
                if (m.biases != nullptr) {
                    y0 = add(y0, load(m.biases + at));
                    y1 = add(y1, load(m.biases + at + kLanes));
                }
                emit(first + r, strip, y0, y1);
            }
        }
    }
}

}  // namespace
}  // namespace outpace
