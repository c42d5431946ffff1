#include "runner.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#if defined(_WIN32)
#include <process.h>
#define getpid _getpid
#else
#include <unistd.h>
#endif

namespace outpace {
namespace {

constexpr int kRowTile = 32;  // kernels may read, not use, rows up to a multiple of this

void check(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
}

void check_matrix(const Linear& m, int inputs, int outputs, const char* name) {
    if (m.inputs != inputs || m.outputs != outputs || m.weights == nullptr)
        throw std::invalid_argument(std::string(name) + " has the wrong shape");
}

template <class T>
void fit(std::vector<T>& buffer, size_t size) {
    if (buffer.size() < size) buffer.resize(size);
}

}  // namespace

std::vector<const Kernels*> available_kernels() {
    std::vector<const Kernels*> found;
#if defined(OUTPACE_X86)
    for (const Kernels* kernels : {&kAmx, &kAvx512, &kAvxVnni, &kAvx2})
        if (kernels->supported()) found.push_back(kernels);
#endif
    found.push_back(&kPortable);
    return found;
}

void Work::allocate() {
    const Shape& s = model->shape;
    const size_t n = rows(), tiled = Shape::padded(std::max<int>(n, wanted.size()), kRowTile);
    const size_t copies_of_one = std::max<size_t>(n, workers);
    const int widest = std::max({s.hidden_pad(), s.attention_pad(), s.intermediate_pad()});
    fit(x, n * s.hidden_pad());
    fit(normed, copies_of_one * s.hidden_pad());
    fit(qkv, model->layers.empty() ? 0 : n * model->layers[0].qkv.strips() * 32);
    fit(mixed, n * s.attention_pad());
    fit(gated, n * s.intermediate_pad());
    quantised_copy = copy_stride = widest;
    fit(quantised, std::max<size_t>(tiled, workers) * widest);
    fit(scales, std::max<size_t>(tiled, 16 * workers));
    fit(copies, static_cast<size_t>(workers) * widest);
    fit(queries, n * s.heads * s.head_pad());
    fit(query_scales, n * s.heads);

    const int group = s.heads / s.kv_heads;
    int blocks = 0;
    chunks = 1;
    tail_stride = 0;
    for (const Pass& pass : passes) {
        blocks += (pass.rows * group + 5) / 6 * s.kv_heads;
        chunks = std::max(chunks, (pass.start + pass.rows - 1) / kPage + 1);
        if (!pass.chain)
            tail_stride = std::max(
                tail_stride, ((pass.start + pass.rows - 1) / 32 - pass.start / 32 + 1) * 32);
    }
    split_chunks = chunks > 1 && blocks < 4 * workers;
    if (split_chunks) fit(partials, n * s.heads * chunks * (16 + s.head_pad()));
    fit(tails, static_cast<size_t>(workers) * 6 * tail_stride);
}

Runner::Runner(Model model, const Kernels& kernels, int threads)
    : model_(std::move(model)), kernels_(kernels), threads_(threads) {
    const Shape& s = model_.shape;
    check(threads >= 1 && threads <= 1024, "threads must lie between 1 and 1024");
    check(s.hidden > 0 && s.intermediate > 0 && s.vocab > 0, "the shape must be positive");
    check(s.kv_heads > 0 && s.heads > 0 && s.heads % s.kv_heads == 0,
          "heads must be a multiple of KV heads");
    check(s.head_dim > 0 && s.head_dim % 2 == 0 && s.head_dim <= 256,
          "head_dim must be even and at most 256");
    const int hidden = s.hidden_pad(), heads = s.heads * s.head_pad();
    for (const Layer& layer : model_.layers) {
        check_matrix(layer.qkv, hidden, heads + 2 * s.kv_heads * s.head_pad(), "qkv");
        check_matrix(layer.output, s.attention_pad(), hidden, "output");
        check_matrix(layer.gate_up, hidden, 2 * s.intermediate_pad(), "gate_up");
        check_matrix(layer.down, s.intermediate_pad(), hidden, "down");
        check(layer.attention_norm && layer.mlp_norm && layer.window >= 0, "a layer is incomplete");
    }
    check_matrix(model_.head, hidden, s.vocab, "head");
    check_matrix(model_.embedding, hidden, s.vocab, "embedding");
    check(model_.final_norm != nullptr, "the final norm is missing");
    work_.model = &model_;
    work_.workers = threads_;
}

void Runner::set_positions(const float* cosines, const float* sines, int positions) {
    model_.cosines = cosines;
    model_.sines = sines;
    model_.positions = positions;
}

void Runner::add(const Request& request) {
    check(request.nodes >= 1, "a tree has at least its root");
    Pass pass;
    pass.cache = request.cache;
    pass.start = request.cache->length();
    pass.first = work_.rows();
    pass.rows = request.nodes;
    pass.chain = true;
    std::vector<int> depth(request.nodes);
    for (int i = 0; i < request.nodes; ++i) {
        const int parent = request.parents[i], token = request.tokens[i];
        check(i == 0 ? parent == -1 : parent >= 0 && parent < i, "a parent must come before its node");
        check(token >= 0 && token < model_.shape.vocab, "a token is outside the vocabulary");
        depth[i] = i == 0 ? 0 : depth[parent] + 1;
        check(pass.start + depth[i] < model_.positions, "a node is past the last position");
        pass.chain = pass.chain && parent == i - 1;
        work_.tokens.push_back(token);
        work_.positions.push_back(pass.start + depth[i]);
        work_.pass_of.push_back(static_cast<int>(work_.passes.size()));
    }
    for (int i = 0; i < request.nodes; ++i) {
        work_.path_begin.push_back(static_cast<int>(work_.paths.size()));
        if (pass.chain) continue;
        const size_t begin = work_.paths.size();
        work_.paths.resize(begin + depth[i] + 1);
        for (int node = i; node >= 0; node = request.parents[node])
            work_.paths[begin + depth[node]] = pass.start + node;
    }
    request.cache->reserve(pass.start + request.nodes);
    request.cache->grow(request.nodes);
    work_.passes.push_back(pass);
}

void Runner::forward(const std::vector<Request>& requests, const std::vector<int>& wanted,
                     float* logits, float* hidden) {
    const std::lock_guard<std::mutex> lock(mutex_);
    work_.passes.clear();
    for (auto* list : {&work_.tokens, &work_.positions, &work_.pass_of, &work_.paths,
                       &work_.path_begin})
        list->clear();
    for (size_t i = 0; i < requests.size(); ++i) {
        for (size_t j = 0; j < i; ++j)
            check(requests[i].cache != requests[j].cache, "a sequence occurs twice in one forward");
        add(requests[i]);
    }
    check(work_.rows() > 0, "a forward needs a row");
    for (int row : wanted) check(row >= 0 && row < work_.rows(), "a wanted row does not exist");
    work_.wanted = wanted;
    work_.logits = logits;
    work_.hidden = hidden;
    work_.allocate();
    run(kernels_.forward);
}

void Runner::project(const float* hidden, int rows, float* logits) {
    check(rows >= 1, "a projection needs a row");
    const std::lock_guard<std::mutex> lock(mutex_);
    work_.wanted.resize(rows);
    for (int i = 0; i < rows; ++i) work_.wanted[i] = i;
    work_.tokens.clear();
    work_.passes.clear();
    work_.logits = logits;
    work_.hidden = const_cast<float*>(hidden);
    work_.allocate();
    run(kernels_.project);
}

void Runner::embed(const int64_t* tokens, int count, float* out) const {
    for (int i = 0; i < count; ++i)
        check(tokens[i] >= 0 && tokens[i] < model_.shape.vocab, "a token is outside the vocabulary");
    kernels_.embed(model_, tokens, count, out);
}

// A forked process has none of the threads: they can be neither used nor joined.
void Runner::drop_foreign_pool() {
    if (pool_ != nullptr && owner_ != getpid()) (void)pool_.release();
}

Runner::~Runner() { drop_foreign_pool(); }

void Runner::run(void (*job)(Work&, int)) {
    drop_foreign_pool();
    if (pool_ == nullptr) {
        pool_ = std::make_unique<Pool>(threads_);
        owner_ = getpid();
    }
    work_.barrier = &pool_->barrier();
    pool_->run([&](int worker) { job(work_, worker); });
}

}  // namespace outpace
