// Checks what it is given, lays out the memory and runs forwards on a pool of threads.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "model.h"
#include "pool.h"

namespace outpace {

// One sequence's share of a forward, as the caller gives it.
struct Request {
    Cache* cache;
    const int32_t* tokens;
    const int32_t* parents;  // parents[0] == -1, parents[i] < i
    int nodes;
};

class Runner {
  public:
    // Throws std::invalid_argument for shapes that do not fit each other or the kernels.
    Runner(Model model, const Kernels& kernels, int threads);
    ~Runner();

    const Model& model() const { return model_; }
    const Kernels& kernels() const { return kernels_; }
    int threads() const { return threads_; }
    void set_positions(const float* cosines, const float* sines, int positions);

    // logits[wanted][vocab] of the wanted rows, counted through all requests; hidden[rows][hidden].
    void forward(const std::vector<Request>& requests, const std::vector<int>& wanted,
                 float* logits, float* hidden);
    void project(const float* hidden, int rows, float* logits);
    void embed(const int64_t* tokens, int count, float* out) const;

  private:
    void add(const Request& request);
    void drop_foreign_pool();
    void run(void (*job)(Work&, int));

    Model model_;
    const Kernels& kernels_;
    const int threads_;
    Work work_;
    std::mutex mutex_;  // one forward at a time
    std::unique_ptr<Pool> pool_;
    long owner_ = 0;  // the process whose threads the pool holds
};

// The instruction sets that this machine can run, the fastest first.
std::vector<const Kernels*> available_kernels();

}  // namespace outpace
