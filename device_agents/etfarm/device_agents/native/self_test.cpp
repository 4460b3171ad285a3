#include "self_test.h"

#include <array>
#include <cstdint>

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

// Calls the kernel as a program would: the output is the last argument, and is repeated for the return value.
void call(const char* name, std::vector<EValue> arguments) {
  const auto refuse = [&](const std::string& what) { throw Failure{"SELF_TEST", std::string(name) + " " + what, "", {name}}; };
  // Kernels specialised for a dtype are registered under it, the others without a key.
  std::vector<executorch::runtime::TensorMeta> metas;
  executorch::aten::DimOrderType order[1] = {0};
  for (const auto& argument : arguments) {
    if (argument.isTensor()) metas.emplace_back(argument.toTensor().scalar_type(), executorch::runtime::Span(order, 1));
  }
  const auto kernel = executorch::runtime::get_op_function_from_registry(name, {metas.data(), metas.size()});
  if (!kernel.ok()) refuse("is not registered");
  arguments.push_back(arguments.back());
  std::vector<EValue*> stack;
  for (auto& argument : arguments) stack.push_back(&argument);
  executorch::runtime::KernelRuntimeContext context;
  (*kernel)(context, {stack.data(), stack.size()});
  if (context.failure_state() != executorch::runtime::Error::Ok) refuse("fails");
}

template <typename T>
void check(const char* name, const Four<T>& actual, const Four<T>& expected) {
  if (actual != expected) throw Failure{"SELF_TEST", std::string(name) + " computes wrongly", "", {name}};
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

  name = "XnnpackBackend";
  const auto* backend = executorch::runtime::get_backend_class(name);
  if (!backend || !backend->is_available()) throw Failure{"SELF_TEST", std::string(name) + " does not initialise", "", {name}};
  passed.emplace_back(name);
  return passed;
}

}  // namespace etfarm
