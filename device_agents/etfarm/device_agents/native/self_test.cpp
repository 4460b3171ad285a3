#include "self_test.h"

#include <array>
#include <cmath>
#include <cstdint>

#include <executorch/extension/memory_allocator/malloc_memory_allocator.h>
#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/kernel/kernel_runtime_context.h>
#include <executorch/runtime/kernel/operator_registry.h>

#include "wire.h"

namespace etfarm {
namespace {

using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::aten::TensorImpl;
using executorch::runtime::EValue;

constexpr std::size_t kSize = 4;
template <typename T>
using Four = std::array<T, kSize>;

// A tensor over an array of four; contiguous, one dim.
class Vector {
 public:
  Vector(ScalarType type, void* data) : impl_(type, 1, size_, data, order_, stride_) {}
  EValue value() { return EValue(Tensor(&impl_)); }

 private:
  TensorImpl::SizesType size_[1] = {kSize};
  TensorImpl::DimOrderType order_[1] = {0};
  TensorImpl::StridesType stride_[1] = {1};
  TensorImpl impl_;
};

// A contiguous tensor [1, length, 1, 4] over an array: keys, values or queries of one head.
class Heads {
 public:
  Heads(std::int32_t length, void* data) : size_{1, length, 1, kSize}, impl_(ScalarType::Float, 4, size_, data, order_, stride_) {
    stride_[0] = length * static_cast<std::int32_t>(kSize);
  }
  EValue value() { return EValue(Tensor(&impl_)); }

 private:
  TensorImpl::SizesType size_[4];
  TensorImpl::DimOrderType order_[4] = {0, 1, 2, 3};
  TensorImpl::StridesType stride_[4] = {0, kSize, kSize, 1};
  TensorImpl impl_;
};

// Calls the kernel as a program would: the output is the last argument, and is repeated for the return value.
void call(const char* name, std::vector<EValue> arguments) {
  const auto refuse = [&](const std::string& what) { throw Failure{"SELF_TEST", std::string(name) + " " + what, "", {name}}; };
  // Kernels specialised for a dtype are registered under it, the others without a key.
  std::vector<executorch::runtime::TensorMeta> metas;
  executorch::aten::DimOrderType order[4] = {0, 1, 2, 3};
  for (const auto& argument : arguments) {
    if (!argument.isTensor()) continue;
    const Tensor tensor = argument.toTensor();
    metas.emplace_back(tensor.scalar_type(), executorch::runtime::Span(order, static_cast<std::size_t>(tensor.dim())));
  }
  const auto kernel = executorch::runtime::get_op_function_from_registry(name, {metas.data(), metas.size()});
  if (!kernel.ok()) refuse("is not registered");
  arguments.push_back(arguments.back());
  std::vector<EValue*> stack;
  for (auto& argument : arguments) stack.push_back(&argument);
  executorch::extension::MallocMemoryAllocator temporary;
  executorch::runtime::KernelRuntimeContext context(nullptr, &temporary);
  (*kernel)(context, {stack.data(), stack.size()});
  if (context.failure_state() != executorch::runtime::Error::Ok) refuse("fails");
}

template <typename T>
void check(const char* name, const Four<T>& actual, const Four<T>& expected) {
  if (actual != expected) throw Failure{"SELF_TEST", std::string(name) + " computes wrongly", "", {name}};
}

// Checks the operators of language models: a key and a value are put behind two others in their caches, and a query, whose
// products with the first and the last key are equal and far above that with the second, gives the mean of their values.
void check_attention(std::vector<std::string>& passed) {
  std::array<float, 4 * kSize> keys{4.0F, 0, 0, 0, -400.0F, 0, 0, 0};
  std::array<float, 4 * kSize> values{1.0F, 2.0F, 3.0F, 4.0F, 500.0F, 500.0F, 500.0F, 500.0F};
  Four<float> key{0, 2.0F, 0, 0};
  Four<float> value{3.0F, 0, -3.0F, 8.0F};
  Four<float> query{1.0F, 2.0F, 0, 0};
  Four<float> result{};
  std::array<float, kSize> unused{};
  constexpr std::int64_t position = 2;
  // Behind the position, where nothing may be read.
  for (std::size_t i = 3 * kSize; i < keys.size(); ++i) keys[i] = values[i] = 1000.0F;

  const char* name = "llama::update_cache.out";
  Heads cached_keys(4, keys.data());
  Heads cached_values(4, values.data());
  Heads new_key(1, key.data());
  Heads new_value(1, value.data());
  Vector ignored(ScalarType::Float, unused.data());
  call(name, {new_key.value(), cached_keys.value(), EValue(position), ignored.value()});
  call(name, {new_value.value(), cached_values.value(), EValue(position), ignored.value()});
  check(name, Four<float>{keys[8], keys[9], keys[10], keys[11]}, key);
  check(name, Four<float>{values[8], values[9], values[10], values[11]}, value);
  passed.emplace_back(name);

  name = "llama::custom_sdpa.out";
  Heads queries(1, query.data());
  Heads attended(1, result.data());
  call(name, {queries.value(), cached_keys.value(), cached_values.value(), EValue(position), EValue(), EValue(0.0), EValue(true), EValue(),
              attended.value()});
  const Four<float> expected{2.0F, 1.0F, 0, 6.0F};
  for (std::size_t i = 0; i < kSize; ++i) {
    // The exponential function is approximated.
    if (!(std::fabs(result[i] - expected[i]) < 1e-4F)) check(name, result, expected);
  }
  passed.emplace_back(name);
}

}  // namespace

std::vector<std::string> self_test() {
  // Values that floats represent exactly, so that every correct kernel computes these bits.
  Four<float> left{1.5F, -2.0F, 0.25F, 8.0F};
  Four<float> right{0.5F, 4.0F, -0.25F, 2.0F};
  Four<float> result{};
  Four<std::int8_t> bytes{};
  Vector a(ScalarType::Float, left.data());
  Vector b(ScalarType::Float, right.data());
  Vector floats(ScalarType::Float, result.data());
  Vector quantized(ScalarType::Char, bytes.data());

  std::vector<std::string> passed;
  const char* name = "aten::add.out";
  call(name, {a.value(), b.value(), EValue(std::int64_t{2}), floats.value()});  // a + 2 b
  check(name, result, {2.5F, 6.0F, -0.25F, 12.0F});
  passed.emplace_back(name);

  name = "aten::mul.out";
  call(name, {a.value(), b.value(), floats.value()});
  check(name, result, {0.75F, -8.0F, -0.0625F, 16.0F});
  passed.emplace_back(name);

  name = "quantized_decomposed::quantize_per_tensor.out";
  call(name, {a.value(), EValue(0.25), EValue(std::int64_t{1}), EValue(std::int64_t{-128}), EValue(std::int64_t{20}),
              EValue(static_cast<std::int64_t>(ScalarType::Char)), quantized.value()});
  check(name, bytes, {7, -7, 2, 20});  // the last is clamped
  passed.emplace_back(name);

  check_attention(passed);

  name = "XnnpackBackend";
  const auto* backend = executorch::runtime::get_backend_class(name);
  if (!backend || !backend->is_available()) throw Failure{"SELF_TEST", std::string(name) + " does not initialise", "", {name}};
  passed.emplace_back(name);
  return passed;
}

}  // namespace etfarm
