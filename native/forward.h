// A forward, compiled once for each instruction set: the including file names it OUTPACE_KERNELS.
#pragma once

#include "attention.h"

namespace outpace {
namespace {

// Where a worker finds quantised rows: shared, or its own copy when a single row runs.
struct Rows {
    uint8_t* bytes;
    float* scales;
};

struct Worker {
    Work& work;
    const int id;
    const Model& model;
    const Shape& shape;
    const int rows;

    Worker(Work& w, int id)
        : work(w), id(id), model(*w.model), shape(w.model->shape), rows(w.rows()) {}

    void meet() const { work.barrier->wait(); }
    Share share(int n) const { return {n, id, work.workers}; }
    Rows quantised() const {
        const size_t copy = rows == 1 ? id : 0;
        return {work.quantised.data() + copy * work.quantised_copy,
                work.scales.data() + copy * kLanes};
    }

    // source(row, buffer) gives n numbers; all workers have them quantised afterwards.
    template <class Source>
    Rows prepare_rows(int n, Source source) const {
        const Rows q = quantised();
        const Share mine = rows == 1 ? Share(1, 0, 1) : share(rows);
        for (int r = mine.begin; r < mine.end; ++r)
            q.scales[r] = prepare(source(r), n, q.bytes + static_cast<size_t>(r) * n);
        if (rows > 1) meet();
        return q;
    }

    float* normed(int r) const {
        const size_t row = rows == 1 ? id : r;
        return work.normed.data() + row * shape.hidden_pad();
    }

    void embed() const {
        const Share mine = share(rows);
        const int n = shape.hidden_pad();
        for (int r = mine.begin; r < mine.end; ++r)
            embed_token(model, work.tokens[r], work.x.data() + static_cast<size_t>(r) * n);
        meet();
    }

    static void embed_token(const Model& model, int token, float* out) {
        const Linear& m = model.embedding;
        const int8_t* strip = m.weights + static_cast<size_t>(token / kStrip) * kStrip * m.inputs;
        const float scale = m.scales[token];
        for (int i = 0; i < m.inputs; i += 4)
            for (int j = 0; j < 4; ++j)
                out[i + j] = scale * strip[i * kStrip + 4 * (token % kStrip) + j];
        rotate(out, m.inputs, kBlock);
        const int hidden = model.shape.hidden;  // rounding left something in the padding
        std::memset(out + hidden, 0, sizeof(float) * (m.inputs - hidden));
    }

    Rows norm_rows(const float* weight) const {
        const int n = shape.hidden_pad();
        return prepare_rows(n, [&](int r) {
            float* out = normed(r);
            normalise(work.x.data() + static_cast<size_t>(r) * n, weight, shape.hidden, n,
                      shape.norm_eps, out);
            return out;
        });
    }

    void project_qkv(const Layer& layer) const {
        const Rows q = norm_rows(layer.attention_norm);
        const int width = layer.qkv.strips() * kStrip;
        float* out = work.qkv.data();
        multiply(layer.qkv, q.bytes, q.scales, rows, share(layer.qkv.strips()),
                 [&](int r, int strip, Vec a, Vec b) {
                     float* to = out + static_cast<size_t>(r) * width + strip * kStrip;
                     store(to, a);
                     store(to + kLanes, b);
                 });
        meet();
    }

    void turn(float* head, const float* norm, int position) const {
        if (norm != nullptr) {
            normalise(head, norm, shape.head_dim, shape.head_pad(), shape.norm_eps, head);
        }
        const int half = shape.head_dim / 2;
        const float* c = model.cosines + static_cast<size_t>(position) * half;
        const float* s = model.sines + static_cast<size_t>(position) * half;
        for (int i = 0; i < half; ++i) {
            const float a = head[i], b = head[i + half];
            head[i] = a * c[i] - b * s[i];
            head[i + half] = b * c[i] + a * s[i];
        }
        rotate(head, shape.head_pad(), head_block(shape.head_pad()));
    }

    // Positions into queries and keys; keys and values into the cache.
    void place(int index, const Layer& layer) const {
        const int heads = shape.heads, kv = shape.kv_heads, pad = shape.head_pad();
        const int items = rows * (heads + kv), width = layer.qkv.strips() * kStrip;
        const float factor =
            1.0f / (std::sqrt(static_cast<float>(shape.head_dim)) * head_block(pad));
        const Share mine = share(items);
        alignas(64) int8_t bytes[256];
        for (int item = mine.begin; item < mine.end; ++item) {
            const int r = item / (heads + kv), h = item % (heads + kv);
            float* row = work.qkv.data() + static_cast<size_t>(r) * width;
            if (h < heads) {
                turn(row + h * pad, layer.query_norm, work.positions[r]);
                const size_t at = static_cast<size_t>(r) * heads + h;
                work.query_scales[at] = quantise(row + h * pad, pad, bytes) * factor;
                bias_bytes(bytes, pad, work.queries.data() + at * pad);
                continue;
            }
            const Pass& pass = work.passes[work.pass_of[r]];
            const int slot = pass.start + (r - pass.first), s = slot % kPage;
            const PageView page = pass.cache->page(index, h - heads, slot / kPage);
            float* key = row + h * pad;
            turn(key, layer.key_norm, work.positions[r]);
            page.key_scales[s] = quantise(key, pad, bytes);
            int total = 0;
            int8_t* lane = page.keys + static_cast<size_t>(s / kStrip) * kStrip * pad +
                           4 * (s % kStrip);
            for (int i = 0; i < pad; i += 4) {
                std::memcpy(lane + kStrip * i, bytes + i, 4);
                total += bytes[i] + bytes[i + 1] + bytes[i + 2] + bytes[i + 3];
            }
            page.key_offsets[s] = 128 * total;
            page.value_scales[s] = quantise(row + (h + kv) * pad, pad, page.values + s * pad);
        }
        meet();
    }

    void attend(int index) const {
        const int pad = shape.head_pad(), group = shape.heads / shape.kv_heads;
        float* tails = work.tails.data() + static_cast<size_t>(id) * kQueries * work.tail_stride;
        alignas(64) float room[kQueries][kLanes + 256], running[kQueries][kLanes + 256];
        int item = 0;
        for (const Pass& pass : work.passes)
            for (int begin = 0; begin < pass.rows * group; begin += kQueries)
                for (int kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
                    const int last = pass.rows * group;
                    const int end = begin + kQueries < last ? begin + kQueries : last;
                    if (!work.split_chunks && item++ % work.workers != id) continue;
                    Block block(work, pass, index, kv_head, begin, end, tails);
                    float* state[kQueries];
                    if (work.split_chunks) {
                        for (int tile = block.first_tile; tile <= block.last_tile; ++tile) {
                            if (item++ % work.workers != id) continue;
                            for (int q = 0; q < block.count; ++q)
                                state[q] = partial(block.row(q), block.head(q), tile);
                            block.tile(tile, tile + work.workers, state);
                        }
                        continue;
                    }
                    for (int q = 0; q < block.count; ++q) running[q][1] = 0.0f;
                    for (int tile = block.first_tile; tile <= block.last_tile; ++tile) {
                        for (int q = 0; q < block.count; ++q) state[q] = room[q];
                        block.tile(tile, tile + 1, state);
                        for (int q = 0; q < block.count; ++q) merge(running[q], room[q], pad);
                    }
                    for (int q = 0; q < block.count; ++q)
                        settle(running[q], block.row(q), block.head(q));
                }
        meet();
        if (!work.split_chunks) return;
        const int window = model.layers[index].window;
        const Share mine = share(rows * shape.heads);
        for (int i = mine.begin; i < mine.end; ++i) {
            const int r = i / shape.heads, head = i % shape.heads;
            const int position = work.positions[r];
            const int low = window > 0 && position >= window ? position - window + 1 : 0;
            running[0][1] = 0.0f;
            for (int tile = low / kPage; tile <= position / kPage; ++tile)
                merge(running[0], partial(r, head, tile), pad);
            settle(running[0], r, head);
        }
        meet();
    }

    float* partial(int row, int head, int tile) const {
        const size_t at = (static_cast<size_t>(row) * shape.heads + head) * work.chunks + tile;
        return work.partials.data() + at * partial_size(shape);
    }
    // A head's result into its row; the last one clears the padding, which rotations fill.
    void settle(const float* state, int row, int head) const {
        const int pad = shape.head_pad(), width = shape.attention_pad();
        float* out = work.mixed.data() + static_cast<size_t>(row) * width;
        finish(state, pad, out + head * pad);
        if (head + 1 == shape.heads)
            std::memset(out + shape.heads * pad, 0, sizeof(float) * (width - shape.heads * pad));
    }

    // x += rows of `buffer` through `matrix`
    void add_projected(const Linear& matrix, float* buffer) const {
        const int n = matrix.inputs;
        const int stride = shape.hidden_pad();
        const Rows q = prepare_rows(n, [&](int r) { return own_copy(buffer, r, n); });
        multiply(matrix, q.bytes, q.scales, rows, share(matrix.strips()),
                 [&](int r, int strip, Vec a, Vec b) {
                     float* to = work.x.data() + static_cast<size_t>(r) * stride + strip * kStrip;
                     store(to, add(load(to), a));
                     store(to + kLanes, add(load(to + kLanes), b));
                 });
        meet();
    }

    // Rotation is in place: where every worker prepares the same row, each takes a copy.
    float* own_copy(float* buffer, int r, int n) const {
        if (rows > 1) return buffer + static_cast<size_t>(r) * n;
        float* copy = work.copies.data() + static_cast<size_t>(id) * work.copy_stride;
        std::memcpy(copy, buffer, sizeof(float) * n);
        return copy;
    }

    void feed_forward(const Layer& layer) const {
        const Rows q = norm_rows(layer.mlp_norm);
        const int stride = shape.intermediate_pad();
        float* out = work.gated.data();
        multiply(layer.gate_up, q.bytes, q.scales, rows, share(layer.gate_up.strips()),
                 [&](int r, int strip, Vec gate, Vec up) {
                     store(out + static_cast<size_t>(r) * stride + strip * kLanes,
                           mul(silu(gate), up));
                 });
        meet();
        add_projected(layer.down, out);
    }

    // Logits of rows[i] for i in [0, count), from hidden(i).
    template <class Hidden>
    void head(int count, Hidden hidden) const {
        const int n = shape.hidden_pad(), vocab = shape.vocab;
        const Share mine = share(count);
        for (int i = mine.begin; i < mine.end; ++i) {
            float* copy = work.copies.data() + static_cast<size_t>(id) * work.copy_stride;
            std::memset(copy, 0, sizeof(float) * n);
            std::memcpy(copy, hidden(i), sizeof(float) * shape.hidden);
            work.scales[i] = prepare(copy, n, work.quantised.data() + static_cast<size_t>(i) * n);
        }
        meet();
        multiply(model.head, work.quantised.data(), work.scales.data(), count,
                 share(model.head.strips()), [&](int i, int strip, Vec a, Vec b) {
                     float* to = work.logits + static_cast<size_t>(i) * vocab + strip * kStrip;
                     if ((strip + 1) * kStrip <= vocab) {
                         store(to, a);
                         store(to + kLanes, b);
                         return;
                     }
                     alignas(64) float both[kStrip];
                     store(both, a);
                     store(both + kLanes, b);
                     std::memcpy(to, both, sizeof(float) * (vocab - strip * kStrip));
                 });
    }

    void forward() const {
        embed();
        for (int index = 0; index < static_cast<int>(model.layers.size()); ++index) {
            const Layer& layer = model.layers[index];
            project_qkv(layer);
            place(index, layer);
            attend(index);
            add_projected(layer.output, work.mixed.data());
            feed_forward(layer);
        }
        const Share mine = share(rows);
        const int n = shape.hidden_pad();
        for (int r = mine.begin; r < mine.end; ++r) {
            float* out = work.normed.data() + static_cast<size_t>(r) * n;
            normalise(work.x.data() + static_cast<size_t>(r) * n, model.final_norm, shape.hidden,
                      n, shape.norm_eps, out);
            std::memcpy(work.hidden + static_cast<size_t>(r) * shape.hidden, out,
                        sizeof(float) * shape.hidden);
        }
        meet();
        if (work.wanted.empty()) return;
        head(static_cast<int>(work.wanted.size()), [&](int i) {
            return work.hidden + static_cast<size_t>(work.wanted[i]) * shape.hidden;
        });
    }
};

void forward(Work& work, int worker) {
    enter();
    Worker(work, worker).forward();
    leave();
}

void project(Work& work, int worker) {
    enter();
    const Worker w(work, worker);
    w.head(static_cast<int>(work.wanted.size()), [&](int i) {
        return work.hidden + static_cast<size_t>(work.wanted[i]) * w.shape.hidden;
    });
    leave();
}

void embed(const Model& model, const int64_t* tokens, int count, float* out) {
    for (int i = 0; i < count; ++i)
        Worker::embed_token(model, static_cast<int>(tokens[i]),
                            out + static_cast<size_t>(i) * model.shape.hidden_pad());
}

}  // namespace
}  // namespace outpace
