// The shared thread pool of ExecuTorch. The wheel exports it without its header, so the used functions are declared here.
#pragma once

#include <cstddef>
#include <cstdint>

namespace executorch::extension::threadpool {

class ThreadPool {
 public:
  std::size_t get_thread_count() const;
  bool _unsafe_reset_threadpool(std::uint32_t num_threads);
};

ThreadPool* get_threadpool();

}  // namespace executorch::extension::threadpool

namespace etfarm {

// Number of threads in the pool; 1 if there is no pool.
inline std::size_t thread_count() {
  const auto* pool = executorch::extension::threadpool::get_threadpool();
  return pool ? pool->get_thread_count() : 1;
}

}  // namespace etfarm
