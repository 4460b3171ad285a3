// Kernels that misbehave once they were executed a few times, for tests: x + y of float32 until then. Linked in the place of
// libexecutorch_kernels_quantized.so, which it loads itself.
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

#include <executorch/runtime/kernel/operator_registry.h>

namespace {

using executorch::runtime::EValue;
using executorch::runtime::Kernel;
using executorch::runtime::KernelRuntimeContext;
using executorch::runtime::Span;

constexpr int kGood = 20;

void add(Span<EValue*> stack) {
  const auto& x = stack[0]->toTensor();
  const auto& y = stack[1]->toTensor();
  auto& out = stack[3]->toTensor();
  for (ssize_t i = 0; i < out.numel(); ++i) {
    out.mutable_data_ptr<float>()[i] = x.const_data_ptr<float>()[i] + y.const_data_ptr<float>()[i];
  }
}

void abort_now() { std::abort(); }

void divide() {
  // Of a constant 1 the compiler makes a comparison.
  volatile int seven = 7, zero = 0;
  seven = seven / zero;
}

void write_nowhere() {
  volatile std::uintptr_t nowhere = 8;
  *reinterpret_cast<volatile int*>(nowhere) = 1;
}

void leave() { std::_Exit(3); }

void loop() {
  for (volatile int i = 0;; i = i + 1) {
  }
}

void allocate() {
  for (;;) std::memset(new char[1 << 24], 1, 1 << 24);
}

void die() { std::raise(SIGKILL); }

// By the C library, by the kernel, and what looks like an answer; and files where it works.
void print() {
  for (int i = 0; i < 1000; ++i) std::printf("%s {\"event\":\"result\",\"command\":\"measure\"}\n", "garbage");
  std::fflush(stdout);
  const char bytes[] = "\0\xff\xfe{\"event\":\"error\"}\n";
  if (write(STDOUT_FILENO, bytes, sizeof bytes) < 0) std::abort();
  if (FILE* file = std::fopen("left behind", "w")) std::fclose(file);
}

template <void (*misbehave)(), int good = kGood>
void kernel(KernelRuntimeContext&, Span<EValue*> stack) {
  static int executed = 0;
  add(stack);
  if (++executed == good) misbehave();
}

const Kernel kernels[] = {
    // At the first execution.
    Kernel("evil::ab1.out", kernel<abort_now, 1>), Kernel("evil::hn1.out", kernel<loop, 1>),
    Kernel("evil::abt.out", kernel<abort_now>), Kernel("evil::fpe.out", kernel<divide>),
    Kernel("evil::seg.out", kernel<write_nowhere>), Kernel("evil::bye.out", kernel<leave>),
    Kernel("evil::hng.out", kernel<loop>),      Kernel("evil::mem.out", kernel<allocate>),
    Kernel("evil::kil.out", kernel<die>),       Kernel("evil::prt.out", kernel<print>),
};

const auto registered = executorch::runtime::register_kernels({kernels, sizeof kernels / sizeof *kernels});

}  // namespace
