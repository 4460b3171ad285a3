// The shared thread pool of ExecuTorch. The wheel exports it without its header, so what we call is declared here.
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

// Threads of the pool; 1 where the machine gives none.
inline std::size_t thread_count() {
  const auto* pool = executorch::extension::threadpool::get_threadpool();
  return pool ? pool->get_thread_count() : 1;
}

}  // namespace etfarm
