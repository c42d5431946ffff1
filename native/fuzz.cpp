// Random models, trees and batches, for the sanitizers: whatever the tree, nothing is read or
// written out of bounds, no thread races, and every path and thread count gives the same bits.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "runner.h"

using namespace outpace;

namespace {

using Random = std::mt19937;

int pick(Random& random, int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
}

// Owns what a packed model points at.
struct Weights {
    std::vector<std::vector<float>> floats;
    std::vector<std::vector<int32_t>> ints;
    std::vector<void*> bytes;

    ~Weights() {
        for (void* p : bytes) std::free(p);
    }

    const float* numbers(Random& random, int size, int filled) {
        std::vector<float> v(size, 0.0f);
        for (int i = 0; i < filled; ++i) v[i] = pick(random, -100, 100) / 50.0f;
        floats.push_back(std::move(v));
        return floats.back().data();
    }

    Linear matrix(Random& random, int inputs, int outputs) {
        Linear m;
        m.inputs = inputs;
        m.outputs = outputs;
        const size_t rows = static_cast<size_t>(m.strips()) * 32, size = rows * inputs;
        auto* weights = static_cast<int8_t*>(std::aligned_alloc(64, size));
        bytes.push_back(weights);
        for (size_t i = 0; i < size; ++i) weights[i] = static_cast<int8_t>(pick(random, -127, 127));
        std::vector<int32_t> offsets(rows, 0);
        for (size_t i = 0; i < size; ++i) {
            const size_t strip = i / (32 * static_cast<size_t>(inputs));
            offsets[strip * 32 + i % 128 / 4] += 128 * weights[i];
        }
        std::vector<float> scales(rows);
        for (float& s : scales) s = pick(random, 1, 9) * 1e-4f;
        floats.push_back(std::move(scales));
        ints.push_back(std::move(offsets));
        m.weights = weights;
        m.scales = floats.back().data();
        m.offsets = ints.back().data();
        if (pick(random, 0, 1) != 0) m.biases = numbers(random, static_cast<int>(rows), 3);
        return m;
    }
};

constexpr int kPositions = 700;

Model random_model(Random& random, Weights& weights) {
    Model m;
    Shape& s = m.shape;
    s.kv_heads = pick(random, 1, 3);
    s.heads = s.kv_heads * pick(random, 1, 4);
    s.head_dim = 2 * pick(random, 2, 40);
    s.hidden = pick(random, 5, 150);
    s.intermediate = pick(random, 5, 150);
    s.vocab = pick(random, 3, 130);
    s.norm_eps = 1e-5f;
    const int pad = s.head_pad(), hidden = s.hidden_pad();
    for (int i = pick(random, 1, 2); i > 0; --i) {
        Layer layer;
        layer.window = pick(random, 0, 2) == 0 ? pick(random, 1, 400) : 0;
        layer.attention_norm = weights.numbers(random, hidden, s.hidden);
        layer.mlp_norm = weights.numbers(random, hidden, s.hidden);
        if (pick(random, 0, 1) != 0) {
            layer.query_norm = weights.numbers(random, pad, s.head_dim);
            layer.key_norm = weights.numbers(random, pad, s.head_dim);
        }
        layer.qkv = weights.matrix(random, hidden, (s.heads + 2 * s.kv_heads) * pad);
        layer.output = weights.matrix(random, s.attention_pad(), hidden);
        layer.gate_up = weights.matrix(random, hidden, 2 * s.intermediate_pad());
        layer.down = weights.matrix(random, s.intermediate_pad(), hidden);
        m.layers.push_back(layer);
    }
    m.final_norm = weights.numbers(random, hidden, s.hidden);
    m.head = weights.matrix(random, hidden, s.vocab);
    m.embedding = weights.matrix(random, hidden, s.vocab);
    m.cosines = weights.numbers(random, kPositions * s.head_dim / 2, kPositions * s.head_dim / 2);
    m.sines = weights.numbers(random, kPositions * s.head_dim / 2, kPositions * s.head_dim / 2);
    m.positions = kPositions;
    return m;
}

struct Trees {
    std::vector<std::vector<int32_t>> tokens, parents;
    std::vector<int> wanted;
};

Trees random_trees(Random& random, int count, int vocab, int most) {
    Trees trees;
    int rows = 0;
    for (int i = 0; i < count; ++i) {
        const int n = pick(random, 1, most);
        const bool chain = pick(random, 0, 2) == 0;
        std::vector<int32_t> tokens(n), parents(n, -1);
        for (int j = 0; j < n; ++j) {
            tokens[j] = pick(random, 0, vocab - 1);
            if (j > 0) parents[j] = chain ? j - 1 : pick(random, 0, j - 1);
        }
        for (int j = 0; j < n; ++j)
            if (pick(random, 0, 1) != 0) trees.wanted.push_back(rows + j);
        rows += n;
        trees.tokens.push_back(std::move(tokens));
        trees.parents.push_back(std::move(parents));
    }
    return trees;
}

// One sequence of forwards; the seed decides all of it, so that runs can be compared.
std::vector<float> play(const Model& model, const Kernels& kernels, int threads, unsigned seed) {
    Random random(seed);
    Runner runner(model, kernels, threads);
    const int layers = static_cast<int>(model.layers.size());
    std::vector<std::unique_ptr<Cache>> caches;
    for (int i = pick(random, 1, 3); i > 0; --i)
        caches.push_back(std::make_unique<Cache>(model.shape, layers));
    std::vector<float> all;
    for (int step = 0; step < 6; ++step) {
        const int most = step == 0 ? 300 : 20;
        const Trees trees =
            random_trees(random, static_cast<int>(caches.size()), model.shape.vocab, most);
        std::vector<Request> requests;
        int rows = 0;
        for (size_t i = 0; i < caches.size(); ++i) {
            const int nodes = static_cast<int>(trees.tokens[i].size());
            requests.push_back(
                {caches[i].get(), trees.tokens[i].data(), trees.parents[i].data(), nodes});
            rows += nodes;
        }
        std::vector<float> logits(trees.wanted.size() * model.shape.vocab);
        std::vector<float> hidden(static_cast<size_t>(rows) * model.shape.hidden);
        runner.forward(requests, trees.wanted, logits.data(), hidden.data());
        all.insert(all.end(), logits.begin(), logits.end());
        all.insert(all.end(), hidden.begin(), hidden.end());
        for (size_t i = 0; i < caches.size(); ++i) {
            std::vector<int> path;
            int node = pick(random, 0, static_cast<int>(trees.tokens[i].size()) - 1);
            for (; node >= 0; node = trees.parents[i][node]) path.insert(path.begin(), node);
            caches[i]->keep(path.data(), static_cast<int>(path.size()));
            if (pick(random, 0, 3) == 0) caches[i]->truncate(pick(random, 0, caches[i]->length()));
        }
    }
    return all;
}

// Trees that are none must be refused, not run.
void refuse(const Model& model, Random& random) {
    Runner runner(model, kPortable, 1);
    Cache cache(model.shape, static_cast<int>(model.layers.size()));
    std::vector<float> logits(model.shape.vocab), hidden(2 * model.shape.hidden);
    const int32_t tokens[] = {pick(random, -3, model.shape.vocab + 2), 0};
    const int32_t parents[] = {pick(random, -2, 1), pick(random, -2, 2)};
    const bool right = tokens[0] >= 0 && tokens[0] < model.shape.vocab && parents[0] == -1 &&
                       parents[1] == 0;
    try {
        runner.forward({{&cache, tokens, parents, 2}}, {1}, logits.data(), hidden.data());
        if (!right) throw std::runtime_error("a wrong tree ran");
    } catch (const std::invalid_argument&) {
        if (right) throw;
    }
}

}  // namespace

int main(int argc, char** argv) {
    const int rounds = argc > 1 ? std::atoi(argv[1]) : 20;
    for (int round = 0; round < rounds; ++round) {
        Random random(round);
        Weights weights;
        const Model model = random_model(random, weights);
        for (int i = 0; i < 20; ++i) refuse(model, random);
        std::vector<float> first;
        for (const Kernels* kernels : available_kernels())
            for (int threads : {1, 2, 4}) {
                const std::vector<float> found = play(model, *kernels, threads, round);
                if (first.empty()) first = found;
                if (std::memcmp(first.data(), found.data(), 4 * first.size()) != 0) {
                    std::printf("round %d: %s with %d threads differs\n", round, kernels->name,
                                threads);
                    return 1;
                }
            }
    }
    std::printf("%d rounds, every path and thread count gave the same bits\n", rounds);
    return 0;
}
