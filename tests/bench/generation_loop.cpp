// The least that generates text with ExecuTorch's own Module: PROGRAM THREADS PROMPT_TOKENS TOKENS REPETITIONS.
// Prints for each repetition the time of decode in ns, by one pair of stamps, and the CPU time of the repetition in ns.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <vector>

#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>

namespace executorch::extension::threadpool {
class ThreadPool {
 public:
  bool _unsafe_reset_threadpool(std::uint32_t num_threads);
};
ThreadPool* get_threadpool();
}  // namespace executorch::extension::threadpool

using executorch::extension::from_blob;
using executorch::extension::Module;
using executorch::runtime::EValue;

namespace {

std::int64_t next_token(Module& module, std::int64_t* tokens, std::int32_t count, std::int64_t position) {
  auto ids = from_blob(tokens, {1, count}, executorch::aten::ScalarType::Long);
  auto start = from_blob(&position, {1}, executorch::aten::ScalarType::Long);
  const auto result = module.forward({EValue(ids), EValue(start)});
  if (!result.ok()) std::exit(1);
  const auto logits = result->at(0).toTensor();
  const float* values = logits.const_data_ptr<float>();
  std::int64_t best = 0;
  for (std::int64_t i = 1; i < logits.numel(); ++i) {
    if (values[i] > values[best]) best = i;
  }
  return best;
}

std::int64_t cpu_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) return 2;
  executorch::extension::threadpool::get_threadpool()->_unsafe_reset_threadpool(static_cast<std::uint32_t>(std::atoi(argv[2])));
  Module module(argv[1], Module::LoadMode::Mmap);
  const int prompt_tokens = std::atoi(argv[3]), tokens = std::atoi(argv[4]), repetitions = std::atoi(argv[5]);
  for (int repetition = 0; repetition < repetitions; ++repetition) {
    const std::int64_t cpu_start = cpu_ns();
    std::vector<std::int64_t> prompt(static_cast<std::size_t>(prompt_tokens), 1);
    std::int64_t token = next_token(module, prompt.data(), prompt_tokens, 0);
    const auto start = std::chrono::steady_clock::now();
    for (int i = 1; i < tokens; ++i) token = next_token(module, &token, 1, prompt_tokens + i - 1);
    const auto took = std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start);
    std::printf("%lld %lld\n", static_cast<long long>(took.count()), static_cast<long long>(cpu_ns() - cpu_start));
  }
  return 0;
}
