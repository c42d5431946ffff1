// What a model is to the kernels: packed weights, shapes, a key-value cache in pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace outpace {

constexpr int kPage = 256;  // slots of a page, and positions of one attention tile

// A packed matrix: strips of 32 outputs, see dot.h. Inputs are a multiple of 64.
struct Linear {
    const int8_t* weights = nullptr;
    const float* scales = nullptr;     // [strips * 32]
    const int32_t* offsets = nullptr;  // [strips * 32], 128 times the sum of an output's weights
    const float* biases = nullptr;     // [strips * 32] or null
    int inputs = 0;
    int outputs = 0;

    int strips() const { return (outputs + 31) / 32; }
};

struct Layer {
    const float* attention_norm = nullptr;
    const float* mlp_norm = nullptr;
    const float* query_norm = nullptr;  // null where the model has none
    const float* key_norm = nullptr;
    Linear qkv, output, gate_up, down;  // gate_up: 16 gates, then their 16 ups, in each strip
    int window = 0;                     // keys that a token sees; 0 = all
};

struct Shape {
    int hidden = 0;
    int heads = 0;
    int kv_heads = 0;
    int head_dim = 0;
    int intermediate = 0;
    int vocab = 0;
    float norm_eps = 0.0f;

    static int padded(int n, int step) { return (n + step - 1) / step * step; }
    int hidden_pad() const { return padded(hidden, 64); }
    int head_pad() const { return padded(head_dim, 16); }
    int attention_pad() const { return padded(heads * head_pad(), 64); }
    int intermediate_pad() const { return padded(intermediate, 64); }
};

struct Model {
    Shape shape;
    std::vector<Layer> layers;
    Linear head, embedding;
    const float* final_norm = nullptr;
    const float* cosines = nullptr;  // [positions][head_dim / 2]
    const float* sines = nullptr;
    int positions = 0;
};

// One KV head's share of a page: keys in strips of 32 slots, values by slot.
struct PageView {
    int8_t* keys;
    int8_t* values;
    float* key_scales;
    int32_t* key_offsets;
    float* value_scales;
};

struct FreePage {
    void operator()(uint8_t* page) const;
};

// One sequence's keys and values. Slots before `length` are committed, slot = position.
class Cache {
  public:
    Cache(const Shape& shape, int layers);
    Cache(const Cache&) = delete;
    Cache& operator=(const Cache&) = delete;

    int length() const { return length_; }
    size_t bytes() const { return pages_.size() * page_bytes_; }
    void reserve(int slots);
    // Moves the slots length + path[i] to length + i and commits them; path is ascending.
    void keep(const int* path, int count);
    void truncate(int length);
    void grow(int count) { pending_ = count; }
    int pending() const { return pending_; }

    PageView page(int layer, int kv_head, int page) const;

  private:
    int layers_, kv_heads_, head_pad_;
    size_t head_bytes_, page_bytes_;
    int length_ = 0;
    int pending_ = 0;  // slots behind the committed ones that the last forward wrote
    std::vector<std::unique_ptr<uint8_t[], FreePage>> pages_;
};

// One sequence's rows of a forward.
struct Pass {
    Cache* cache = nullptr;
    int start = 0;       // committed slots
    int first = 0;       // its first row
    int rows = 0;
    bool chain = false;  // every row's parent is the row before it
};

class Barrier;

// One forward: rows of several passes, and the memory it works in.
struct Work {
    const Model* model = nullptr;
    std::vector<Pass> passes;
    std::vector<int> tokens, positions, pass_of;
    std::vector<int> paths, path_begin;  // slots of a row's ancestors from the root on, itself last
    std::vector<int> wanted;             // rows whose logits are asked for
    float* logits = nullptr;             // [wanted][vocab]
    float* hidden = nullptr;             // [rows][hidden]
    int workers = 1;
    Barrier* barrier = nullptr;

    int rows() const { return static_cast<int>(tokens.size()); }
    // Sizes the buffers below for the rows and passes above.
    void allocate();
    std::vector<float> x, qkv, mixed, gated;  // [rows][...], padded as the shape says
    std::vector<float> normed;                // [rows], or one a worker when a single row runs
    std::vector<float> copies;                // [workers][copy_stride]
    std::vector<uint8_t> quantised;           // [rows][inputs], or [workers][quantised_copy]
    std::vector<float> scales;
    std::vector<uint8_t> queries;             // [rows][heads][head_pad]
    std::vector<float> query_scales;          // [rows][heads]
    std::vector<float> partials;              // [rows][heads][chunks][...] where tiles are shared out
    std::vector<float> tails;                 // a worker's scores of a tree's own slots
    int quantised_copy = 0, copy_stride = 0, tail_stride = 0;
    int chunks = 1;
    bool split_chunks = false;  // workers share the tiles of a block, not the blocks
};

// An instruction set's way of running a forward; every way gives the same bits.
struct Kernels {
    const char* name;
    bool (*supported)();
    void (*forward)(Work&, int worker);
    // logits[rows][vocab] of hidden[rows][hidden]; uses work.x, quantised and scales
    void (*project)(Work&, int worker);
    void (*embed)(const Model&, const int64_t* tokens, int count, float* out);
};

extern const Kernels kAmx, kAvx512, kAvxVnni, kAvx2, kPortable;

}  // namespace outpace
