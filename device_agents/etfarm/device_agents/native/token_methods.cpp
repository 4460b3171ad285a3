#include "token_methods.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace etfarm {
namespace {

using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::runtime::EValue;

void store(Bytes& bytes, ScalarType type, std::int64_t index, std::int64_t value) {
  if (type == ScalarType::Int) {
    const auto narrow = static_cast<std::int32_t>(value);
    std::memcpy(bytes.data() + static_cast<std::size_t>(index) * sizeof(narrow), &narrow, sizeof(narrow));
  } else {
    std::memcpy(bytes.data() + static_cast<std::size_t>(index) * sizeof(value), &value, sizeof(value));
  }
}

// Returns the index of the largest value, the lowest of equal ones; -1 where no value is above minus infinity.
template <typename T>
std::int64_t argmax(const T* values, std::int64_t count) {
  std::int64_t best = -1;
  float largest = -std::numeric_limits<float>::infinity();
  for (std::int64_t i = 0; i < count; ++i) {
    const auto value = static_cast<float>(values[i]);
    if (value > largest) {
      largest = value;
      best = i;
    }
  }
  return best;
}

}  // namespace

TokenMethod::TokenMethod(Session& session, const std::string& name, std::size_t token_input, std::size_t position_input)
    : method_(session.loaded(name)), inputs_(session.inputs(name)), token_index_(token_input), position_index_(position_input) {
  if (position_input == token_input) refuse("the tokens and their positions must be different inputs");
  tokens_ = describe(session, token_input, "tokens");
  positions_ = describe(session, position_input, "positions");
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    if (i != token_input && i != position_input && !inputs_[i]) refuse("input " + std::to_string(i) + " is not set");
  }
}

void TokenMethod::execute(const std::int64_t* tokens, std::int64_t count, std::int64_t position) {
  if (count != count_) {
    set(token_index_, tokens_, count);
    set(position_index_, positions_, takes_start() ? 1 : count);
    count_ = count;
  }
  Bytes& ids = inputs_[token_index_]->bytes();
  for (std::int64_t i = 0; i < count; ++i) store(ids, tokens_.type, i, tokens[i]);
  Bytes& positions = inputs_[position_index_]->bytes();
  for (std::int64_t i = 0; i < (takes_start() ? 1 : count); ++i) store(positions, positions_.type, i, position + i);
  method_.execute(inputs_);
}

std::int64_t TokenMethod::next_token() {
  const Tensor values = logits();
  const std::int64_t count = values.sizes().back();
  const std::int64_t first = static_cast<std::int64_t>(values.numel()) - count;  // the last row
  std::int64_t best = -1;
  switch (values.scalar_type()) {
    case ScalarType::Float:
      best = argmax(values.const_data_ptr<float>() + first, count);
      break;
    case ScalarType::Half:
      best = argmax(values.const_data_ptr<executorch::aten::Half>() + first, count);
      break;
    case ScalarType::BFloat16:
      best = argmax(values.const_data_ptr<executorch::aten::BFloat16>() + first, count);
      break;
    default:
      refuse(std::string("logits must be float32, float16 or bfloat16, not ") + dtype_name(values.scalar_type()));
  }
  if (best < 0) throw Failure{"RUNTIME", "method '" + method_.name() + "' returned logits without a largest one: all are NaN or -inf", "", {}};
  return best;
}

void TokenMethod::last_logits(std::vector<float>& values) {
  const Tensor tensor = logits();
  const std::int64_t count = tensor.sizes().back();
  const std::int64_t first = static_cast<std::int64_t>(tensor.numel()) - count;  // the last row
  values.resize(static_cast<std::size_t>(count));
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      std::copy_n(tensor.const_data_ptr<float>() + first, count, values.begin());
      break;
    case ScalarType::Half:
      std::copy_n(tensor.const_data_ptr<executorch::aten::Half>() + first, count, values.begin());
      break;
    case ScalarType::BFloat16:
      std::copy_n(tensor.const_data_ptr<executorch::aten::BFloat16>() + first, count, values.begin());
      break;
    default:
      refuse(std::string("logits must be float32, float16 or bfloat16, not ") + dtype_name(tensor.scalar_type()));
  }
}

void TokenMethod::refuse(const std::string& why) const {
  throw Failure{"INPUT_MISMATCH", "method '" + method_.name() + "' cannot generate text: " + why, "", {}};
}

ExpectedTensor TokenMethod::describe(Session& session, std::size_t index, const char* what) {
  const std::string input = "input " + std::to_string(index) + " (" + what + ")";
  if (index >= inputs_.size()) refuse(input + " does not exist: it takes " + std::to_string(inputs_.size()));
  if (!method_.input(index).isTensor()) refuse(input + " is not a tensor");
  ExpectedTensor tensor = session.expected(method_, index);
  if (tensor.type != ScalarType::Long && tensor.type != ScalarType::Int) {
    refuse(input + " must be int64 or int32, not " + dtype_name(tensor.type));
  }
  std::int64_t elements = 1;
  for (const auto size : tensor.shape) elements *= size;
  if (tensor.shape.empty() || elements < 1 || elements != tensor.shape.back()) {
    refuse(input + " must have the shape [1, tokens] or [tokens], not " + shape_text(tensor.shape));
  }
  return tensor;
}

void TokenMethod::set(std::size_t index, const ExpectedTensor& tensor, std::int64_t count) {
  const bool fits = tensor.dynamic ? count <= tensor.shape.back() : count == tensor.shape.back();
  if (!fits) {
    refuse("input " + std::to_string(index) + " takes " + std::to_string(tensor.shape.back()) + (tensor.dynamic ? " tokens at most" : " tokens") +
           ", not " + std::to_string(count));
  }
  std::vector<std::int64_t> shape = tensor.shape;
  shape.back() = count;
  inputs_[index] = Input::tensor(tensor.type, shape, tensor.dim_order, Bytes(static_cast<std::size_t>(count) * item_bytes(tensor.type)));
}

Tensor TokenMethod::logits() {
  const EValue& value = method_.method().get_output(0);
  if (!value.isTensor() || value.toTensor().dim() == 0 || value.toTensor().numel() == 0) refuse("its first output must be logits");
  return value.toTensor();
}

LanguageModel::LanguageModel(Session& session, const ModelMethods& methods)
    : methods_(methods), prefill_(session, methods.prefill, methods.token_input, methods.position_input) {
  if (methods.decode != methods.prefill) decode_.emplace(session, methods.decode, methods.token_input, methods.position_input);
  latest_ = &prefill_;
}

void LanguageModel::process(const std::vector<std::int64_t>& context, std::int64_t begin, std::int64_t end) {
  const std::int64_t largest = std::min(methods_.max_chunk, prefill_.most());
  while (begin < end) {
    const std::int64_t chunk = std::min(largest, end - begin);
    const bool together = chunk >= prefill_.least();
    latest_ = together ? &prefill_ : &decode();
    const std::int64_t count = together ? chunk : 1;
    latest_->execute(context.data() + begin, count, begin);
    begin += count;
  }
}

void LanguageModel::step(std::int64_t token, std::int64_t position) {
  latest_ = &decode();
  latest_->execute(&token, 1, position);
}

}  // namespace etfarm
