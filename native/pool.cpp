#include "pool.h"

#include <chrono>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace outpace {
namespace {

constexpr int kSpins = 1000;  // tries before a waiting worker yields its core
constexpr std::chrono::microseconds kAwake(300);  // between two runs, before a worker sleeps

inline void pause() {
#if defined(__x86_64__) || defined(_M_X64)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

void Barrier::wait() {
    if (workers_ == 1) return;
    const uint32_t round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == workers_) {
        arrived_.store(0, std::memory_order_relaxed);
        round_.store(round + 1, std::memory_order_release);
        return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
        if (spins < kSpins)
            pause();
        else
            std::this_thread::yield();
    }
}

Pool::Pool(int threads) : threads_(threads), barrier_(threads) {
    for (int worker = 1; worker < threads; ++worker)
        workers_.emplace_back([this, worker] { work(worker); });
}

Pool::~Pool() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stopping_.store(true);
        round_.fetch_add(1);
    }
    wake_.notify_all();
    for (std::thread& thread : workers_) thread.join();
}

void Pool::run(const std::function<void(int)>& job) {
    job_ = &job;
    running_.store(threads_ - 1, std::memory_order_relaxed);
    round_.fetch_add(1);  // sequentially consistent with the sleepers' count
    if (sleeping_.load() > 0) {
        const std::lock_guard<std::mutex> lock(mutex_);
        wake_.notify_all();
    }
    job(0);
    for (int spins = 0; running_.load(std::memory_order_acquire) != 0; ++spins) {
        if (spins < kSpins)
            pause();
        else
            std::this_thread::yield();
    }
}

void Pool::work(int worker) {
    uint32_t seen = 0;
    while (true) {
        const auto since = std::chrono::steady_clock::now();
        for (int spins = 1; round_.load() == seen; ++spins) {
            pause();
            if (spins % 64 != 0 || std::chrono::steady_clock::now() - since < kAwake) continue;
            std::unique_lock<std::mutex> lock(mutex_);
            sleeping_.fetch_add(1);
            wake_.wait(lock, [&] { return round_.load() != seen; });
            sleeping_.fetch_sub(1);
        }
        ++seen;
        if (stopping_.load()) return;
        (*job_)(worker);
        running_.fetch_sub(1, std::memory_order_acq_rel);
    }
}

}  // namespace outpace
