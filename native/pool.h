// Threads that run one function side by side and meet at barriers.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace outpace {

// All workers meet here; they spin for a while, then let others run.
class Barrier {
  public:
    explicit Barrier(int workers) : workers_(workers) {}
    void wait();

  private:
    const int workers_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
};

// `threads` workers, the caller being one; the others spin briefly between runs, then sleep.
class Pool {
  public:
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return threads_; }
    Barrier& barrier() { return barrier_; }
    void run(const std::function<void(int)>& job);

  private:
    void work(int worker);

    const int threads_;
    Barrier barrier_;
    const std::function<void(int)>* job_ = nullptr;
    alignas(64) std::atomic<uint32_t> round_{0};
    alignas(64) std::atomic<int> running_{0};
    std::atomic<int> sleeping_{0};
    std::atomic<bool> stopping_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
};

}  // namespace outpace
