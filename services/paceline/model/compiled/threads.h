// Threads that help the one that calls them. See linear.py.
//
// Helpers that have nothing to do look for work for some microseconds, as the next product of a step is that far away,
// and then sleep. One that comes too late for a piece of work finds it done by the caller, who waits for those alone that
// have begun: a helper whose core another process uses costs nothing but its help.

#pragma once

#include <immintrin.h>
#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace paceline {

class Helpers {
 public:
  // Made and ended by the thread that is helped. Where it may run on enough cores, each thread has one to itself.
  explicit Helpers(int count) {
    CPU_ZERO(&allowed_);
    pthread_getaffinity_np(pthread_self(), sizeof allowed_, &allowed_);
    std::vector<int> cores;
    for (int core = 0; core < CPU_SETSIZE; ++core) {
      if (CPU_ISSET(core, &allowed_)) cores.push_back(core);
    }
    const bool enough = static_cast<int>(cores.size()) > count;
    if (enough) pin(cores[0]);
    for (int i = 0; i < count; ++i) {
      threads_.emplace_back([this, core = enough ? cores[i + 1] : -1] {
        if (core >= 0) pin(core);
        help();
      });
    }
  }

  ~Helpers() {
    ended_ = true;
    wake();
    for (auto& thread : threads_) thread.join();
    pthread_setaffinity_np(pthread_self(), sizeof allowed_, &allowed_);
  }

  int count() const { return static_cast<int>(threads_.size()); }

  // work(i) for all i below `pieces`, each once, in this thread and the helpers; returns when all are done.
  template <class Work>
  void share(int64_t pieces, const Work& work) {
    share(pieces, [](const void* it, int64_t piece) { (*static_cast<const Work*>(it))(piece); }, &work);
  }

  void share(int64_t pieces, void (*call)(const void* work, int64_t piece), const void* work) {
    call_ = call, work_ = work, pieces_ = pieces;
    next_.store(0, std::memory_order_relaxed);
    inside_.fetch_and(~kClosed, std::memory_order_acq_rel);  // not set to 0: one that came too late may be leaving
    wake();
    take();
    inside_.fetch_or(kClosed, std::memory_order_acq_rel);
    while (inside_.load(std::memory_order_acquire) != kClosed) _mm_pause();
  }

 private:
  static constexpr uint32_t kClosed = 1u << 31;
  static constexpr int kLooks = 2000;  // of 20 to 40 ns

  static void pin(int core) {
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET(core, &own);
    pthread_setaffinity_np(pthread_self(), sizeof own, &own);
  }

  void wake() {
    round_.fetch_add(1, std::memory_order_seq_cst);
    if (asleep_.load(std::memory_order_seq_cst) > 0) round_.notify_all();
  }

  void take() {
    for (int64_t piece; (piece = next_.fetch_add(1, std::memory_order_relaxed)) < pieces_;) call_(work_, piece);
  }

  void help() {
    uint32_t seen = 0;
    for (;;) {
      for (int i = 0; i < kLooks && round_.load(std::memory_order_acquire) == seen; ++i) _mm_pause();
      if (round_.load(std::memory_order_acquire) == seen) {
        asleep_.fetch_add(1, std::memory_order_seq_cst);
        round_.wait(seen, std::memory_order_seq_cst);
        asleep_.fetch_sub(1, std::memory_order_seq_cst);
      }
      seen = round_.load(std::memory_order_acquire);
      if (ended_) return;
      if ((inside_.fetch_add(1, std::memory_order_acq_rel) & kClosed) == 0) take();
      inside_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  std::atomic<uint32_t> round_{0};   // counts the calls
  std::atomic<uint32_t> inside_{kClosed};  // helpers that work, and whether no more may begin
  std::atomic<int64_t> next_{0};
  std::atomic<int> asleep_{0};
  std::atomic<bool> ended_{false};
  void (*call_)(const void*, int64_t) = nullptr;
  const void* work_ = nullptr;
  int64_t pieces_ = 0;
  cpu_set_t allowed_;  // of the caller, before
  std::vector<std::thread> threads_;
};

}  // namespace paceline
