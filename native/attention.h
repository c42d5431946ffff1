// Attention of query rows over a paged cache, in tiles fixed by absolute position.
//
// A row's tile is computed from its own ancestors alone, in position order, and tiles are merged
// in order: where a key stands in the cache and which rows run beside it change no bit.
#pragma once

#include "linear.h"

namespace outpace {
namespace {

#if defined(__AVX512F__)
constexpr int kQueries = 6, kSlice = 4;  // a block's rows and vectors of sums, kept in registers
#else
constexpr int kQueries = 2, kSlice = 2;
#endif

constexpr float kUnseen = -1e30f;

inline int head_block(int head_pad) {
    return head_pad % 64 == 0 ? 64 : head_pad % 32 == 0 ? 32 : 16;
}

inline float exp1(float x) {
    float lanes[kLanes];
    store(lanes, exp(splat(x)));
    return lanes[0];
}

// A query's state over some tiles: [maximum, sum, 14 unused, weighted values].
inline int partial_size(const Shape& s) { return kLanes + s.head_pad(); }

inline void merge(float* state, const float* tile, int head_pad) {
    if (tile[1] == 0.0f) return;  // it saw nothing there
    if (state[1] == 0.0f) {
        std::memcpy(state, tile, sizeof(float) * (kLanes + head_pad));
        return;
    }
    const float top = state[0] > tile[0] ? state[0] : tile[0];
    // one of the two is e^0 = 1
    const float a = state[0] == top ? 1.0f : exp1(state[0] - top);
    const float b = tile[0] == top ? 1.0f : exp1(tile[0] - top);
    state[0] = top;
    state[1] = std::fma(state[1], a, tile[1] * b);
    const Vec va = splat(a), vb = splat(b);
    for (int i = kLanes; i < kLanes + head_pad; i += kLanes)
        store(state + i, fma(load(state + i), va, mul(load(tile + i), vb)));
}

inline void finish(const float* state, int head_pad, float* out) {
    const Vec total = splat(state[1]);
    for (int i = 0; i < head_pad; i += kLanes) store(out + i, div(load(state + kLanes + i), total));
}

// sums[q] += weights[q][j] * values[j] for j in [from, to), in order; `next` is read soon after.
template <int queries, int vectors>
inline void weigh(const int8_t* values, const int8_t* next, int head_pad, int from, int to,
                  const float (*weights)[kPage], float* const* sums) {
    Vec a[queries][vectors];
    for (int q = 0; q < queries; ++q)
        for (int v = 0; v < vectors; ++v) a[q][v] = load(sums[q] + kLanes * v);
    for (int j = from; j < to; ++j) {
        fetch_line(next + static_cast<size_t>(j) * head_pad);
        Vec value[vectors];
        for (int v = 0; v < vectors; ++v) value[v] = from_int8(values + j * head_pad + kLanes * v);
        for (int q = 0; q < queries; ++q) {
            const Vec w = splat(weights[q][j]);
            for (int v = 0; v < vectors; ++v) a[q][v] = fma(w, value[v], a[q][v]);
        }
    }
    for (int q = 0; q < queries; ++q)
        for (int v = 0; v < vectors; ++v) store(sums[q] + kLanes * v, a[q][v]);
}

template <int queries>
inline void weigh_slices(const int8_t* values, const int8_t* next, int head_pad, int from, int to,
                         const float (*weights)[kPage], float* const* sums) {
    for (int i = 0; i < head_pad; i += kLanes * kSlice) {
        float* at[queries];
        for (int q = 0; q < queries; ++q) at[q] = sums[q] + i;
        const int left = (head_pad - i) / kLanes;
        if (left >= kSlice)
            weigh<queries, kSlice>(values + i, next + i, head_pad, from, to, weights, at);
        else if (left == 3)
            weigh<queries, 3>(values + i, next + i, head_pad, from, to, weights, at);
        else if (left == 2)
            weigh<queries, 2>(values + i, next + i, head_pad, from, to, weights, at);
        else
            weigh<queries, 1>(values + i, next + i, head_pad, from, to, weights, at);
    }
}

// One KV head's queries [begin, end) of one pass; query = row of the pass * heads per KV head + i.
struct Block {
    const Work& work;
    const Pass& pass;
    int layer, kv_head, begin, end;
    int count, group, head_pad;
    int first_tile = 0, last_tile = 0;
    uint8_t bytes[kQueries][256];  // head_dim is at most 256
    float scales[kQueries];
    int position[kQueries], lowest[kQueries];
    float* tails;  // [kQueries][tail_stride]: scores of this forward's own slots, for trees

    Block(const Work& work, const Pass& pass, int layer, int kv_head, int begin, int end,
          float* tails)
        : work(work), pass(pass), layer(layer), kv_head(kv_head), begin(begin), end(end),
          tails(tails) {
        const Shape& s = work.model->shape;
        count = end - begin;
        group = s.heads / s.kv_heads;
        head_pad = s.head_pad();
        const int window = work.model->layers[layer].window;
        for (int q = 0; q < count; ++q) {
            const int row = this->row(q), head = this->head(q);
            const size_t at = static_cast<size_t>(row) * s.heads + head;
            std::memcpy(bytes[q], work.queries.data() + at * head_pad, head_pad);
            scales[q] = work.query_scales[at];
            position[q] = work.positions[row];
            lowest[q] = window > 0 && position[q] >= window ? position[q] - window + 1 : 0;
            const int low = lowest[q] / kPage, high = position[q] / kPage;
            first_tile = q == 0 || low < first_tile ? low : first_tile;
            last_tile = high > last_tile ? high : last_tile;
        }
        if (!pass.chain) score_tails();
    }

    int row(int q) const { return pass.first + (begin + q) / group; }
    int head(int q) const { return kv_head * group + (begin + q) % group; }
    void score_strip(const PageView& page, int strip, float* const* out) const {
        Sums sums[kQueries];
        const int8_t* values = page.values + static_cast<size_t>(strip) * kStrip * head_pad;
        for (int i = 0; i < kStrip * head_pad; i += 64) fetch_line(values + i);
        for (int q = 0; q < count; q += kMaxFew)
            dot_few(page.keys + static_cast<size_t>(strip) * kStrip * head_pad, bytes[q], 256,
                    head_pad, count - q < kMaxFew ? count - q : kMaxFew, sums + q);
        for (int half = 0; half < kStrip; half += kLanes) {
            const Vec scale = load(page.key_scales + strip * kStrip + half);
            const int32_t* offsets = page.key_offsets + strip * kStrip + half;
            for (int q = 0; q < count; ++q)
                store(out[q] + half,
                      mul(mul(products(sums[q].v + half, offsets), scale), splat(scales[q])));
        }
    }

    void score_tails() {
        const int from = pass.start / kStrip, to = (pass.start + pass.rows - 1) / kStrip;
        constexpr int strips = kPage / kStrip;
        for (int strip = from; strip <= to; ++strip) {
            const PageView page = pass.cache->page(layer, kv_head, strip / strips);
            float* out[kQueries];
            for (int q = 0; q < count; ++q)
                out[q] = tails + static_cast<size_t>(q) * work.tail_stride + (strip - from) * kStrip;
            score_strip(page, strip % strips, out);
        }
    }

    // state[q] = the tile's maximum, sum and weighted values; `following` is this worker's next.
    void tile(int number, int following, float* const* state) const {
        alignas(64) float s[kQueries][kPage];
        const int base = number * kPage;
        const PageView page = pass.cache->page(layer, kv_head, number);
        const int8_t* next =
            following <= last_tile ? pass.cache->page(layer, kv_head, following).keys : page.keys;
        int seen_from[kQueries], in_place[kQueries], seen_to[kQueries];
        int from = kPage, to = 0;
        for (int q = 0; q < count; ++q) {
            const int natural = pass.chain ? position[q] + 1 : pass.start;  // slot = position below
            seen_from[q] = clamp(lowest[q] - base);
            in_place[q] = clamp(natural - base);
            seen_to[q] = clamp(position[q] + 1 - base);
            if (seen_from[q] < in_place[q]) {
                from = seen_from[q] < from ? seen_from[q] : from;
                to = in_place[q] > to ? in_place[q] : to;
            }
        }
        for (int strip = from / kStrip; strip * kStrip < to; ++strip) {
            float* out[kQueries];
            for (int q = 0; q < count; ++q) out[q] = s[q] + strip * kStrip;
            score_strip(page, strip, out);
        }
        float* sums[kQueries];
        for (int q = 0; q < count; ++q) {
            soften(page, base, s[q], q, seen_from[q], in_place[q], seen_to[q], from, to, state[q]);
            sums[q] = state[q] + kLanes;
        }
        switch (from < to ? count : 0) {
            case 1: weigh_slices<1>(page.values, next, head_pad, from, to, s, sums); break;
            case 2: weigh_slices<2>(page.values, next, head_pad, from, to, s, sums); break;
#if defined(__AVX512F__)
            case 3: weigh_slices<3>(page.values, next, head_pad, from, to, s, sums); break;
            case 4: weigh_slices<4>(page.values, next, head_pad, from, to, s, sums); break;
            case 5: weigh_slices<5>(page.values, next, head_pad, from, to, s, sums); break;
            case 6: weigh_slices<6>(page.values, next, head_pad, from, to, s, sums); break;
#endif
        }
        for (int q = 0; q < count; ++q) {
            const int* path = work.paths.data() + work.path_begin[row(q)];
            for (int j = in_place[q] > seen_from[q] ? in_place[q] : seen_from[q]; j < seen_to[q]; ++j) {
                const int slot = path[base + j - pass.start];
                const PageView own = pass.cache->page(layer, kv_head, slot / kPage);
                weigh_one(own.values + static_cast<size_t>(slot % kPage) * head_pad, s[q][j],
                          sums[q]);
            }
        }
    }

  private:
    static int clamp(int n) { return n < 0 ? 0 : n > kPage ? kPage : n; }

    void weigh_one(const int8_t* value, float weight, float* sums) const {
        const Vec w = splat(weight);
        for (int i = 0; i < head_pad; i += kLanes)
            store(sums + i, fma(w, from_int8(value + i), load(sums + i)));
    }

    // Scores of one query to weights of values, in place; starts its state.
    void soften(const PageView& page, int base, float* s, int q, int seen_from, int in_place,
                int seen_to, int from, int to, float* state) const {
        std::memset(state, 0, sizeof(float) * (kLanes + head_pad));
        state[0] = kUnseen;
        const int lower = from < seen_from ? from : seen_from;
        int begin = lower / kLanes * kLanes;
        int end = to > seen_to ? to : seen_to;
        end = (end + kLanes - 1) / kLanes * kLanes;
        if (seen_from >= seen_to) {
            for (int j = begin; j < end; ++j) s[j] = 0.0f;
            return;
        }
        for (int j = begin; j < seen_from; ++j) s[j] = kUnseen;
        for (int j = seen_to; j < end; ++j) s[j] = kUnseen;
        const float* value_scales = page.value_scales;
        alignas(64) float own_scales[kPage];
        const int tail = in_place > seen_from ? in_place : seen_from;
        if (tail < seen_to) {  // keys of this forward, which stand elsewhere
            std::memcpy(own_scales, value_scales, sizeof own_scales);
            const int* path = work.paths.data() + work.path_begin[row(q)] + (base - pass.start);
            const float* scores = tails + static_cast<size_t>(q) * work.tail_stride;
            const int first_score = pass.start / kStrip * kStrip;
            for (int j = tail; j < seen_to; ++j) {
                const int slot = path[j], at = slot % kPage;
                s[j] = scores[slot - first_score];
                own_scales[j] = pass.cache->page(layer, kv_head, slot / kPage).value_scales[at];
            }
            value_scales = own_scales;
        }
        Vec top = splat(kUnseen);
        for (int j = begin; j < end; j += kLanes) top = max(load(s + j), top);
        const float m = largest(top);
        Vec total = splat(0.0f);
        const Vec unseen = splat(0.5f * kUnseen);
        for (int j = begin; j < end; j += kLanes) {
            const Vec score = load(s + j);
            const Vec weight = where_above(exp(sub(score, splat(m))), score, unseen);
            total = add(total, weight);
            // a free slot's scale may be anything
            store(s + j, where_above(mul(weight, load(value_scales + j)), score, unseen));
        }
        state[0] = m;
        state[1] = sum(total);
    }
};

}  // namespace
}  // namespace outpace
