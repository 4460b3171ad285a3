#include "token_methods.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace etfarm {
namespace {

using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::runtime::EValue;

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

[[noreturn]] void refuse_method(const LoadedMethod& method, const std::string& why) {
  throw Failure{"INPUT_MISMATCH", "method '" + method.name() + "' cannot generate text: " + why, "", {}};
}

void require_count(const LoadedMethod& method, std::size_t index, const ExpectedTensor& tensor, std::int64_t most, std::int64_t count) {
  const bool fits = tensor.dynamic ? count <= most : count == most;
  if (!fits) {
    refuse_method(method, "input " + std::to_string(index) + " takes " + std::to_string(most) + (tensor.dynamic ? " tokens at most" : " tokens") +
                              ", not " + std::to_string(count));
  }
}

}  // namespace

std::vector<std::string> ModelMethods::names() const {
  std::vector<std::string> all = encoders;
  if (!embedding.empty()) all.push_back(embedding);
  all.push_back(prefill);
  if (decode != prefill) all.push_back(decode);
  return all;
}

ExpectedTensor expected_row(Session& session, LoadedMethod& method, std::size_t index, std::size_t inputs, const char* what) {
  const std::string input = "input " + std::to_string(index) + " (" + what + ")";
  if (index >= inputs) refuse_method(method, input + " does not exist: it takes " + std::to_string(inputs));
  if (!method.input(index).isTensor()) refuse_method(method, input + " is not a tensor");
  ExpectedTensor tensor = session.expected(method, index);
  if (tensor.type != ScalarType::Long && tensor.type != ScalarType::Int) {
    refuse_method(method, input + " must be int64 or int32, not " + dtype_name(tensor.type));
  }
  std::int64_t elements = 1;
  for (const auto size : tensor.shape) elements *= size;
  if (tensor.shape.empty() || elements < 1 || elements != tensor.shape.back()) {
    refuse_method(method, input + " must have the shape [1, tokens] or [tokens], not " + shape_text(tensor.shape));
  }
  return tensor;
}

Input integers(LoadedMethod& method, std::size_t index, const ExpectedTensor& tensor, std::int64_t count) {
  require_count(method, index, tensor, tensor.shape.back(), count);
  std::vector<std::int64_t> shape = tensor.shape;
  shape.back() = count;
  return Input::tensor(tensor.type, shape, tensor.dim_order, Bytes(static_cast<std::size_t>(count) * item_bytes(tensor.type)));
}

void store(Bytes& bytes, ScalarType type, const std::int64_t* values, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    if (type == ScalarType::Int) {
      const auto narrow = static_cast<std::int32_t>(values[i]);
      std::memcpy(bytes.data() + static_cast<std::size_t>(i) * sizeof(narrow), &narrow, sizeof(narrow));
    } else {
      std::memcpy(bytes.data() + static_cast<std::size_t>(i) * sizeof(*values), values + i, sizeof(*values));
    }
  }
}

TokenMethod::TokenMethod(Session& session, const std::string& name, std::size_t token_input, std::size_t position_input, TokenEmbedding* embedding)
    : method_(session.loaded(name)),
      embedding_(embedding),
      inputs_(session.inputs(name)),
      token_index_(token_input),
      position_index_(position_input) {
  if (position_input == token_input) refuse("the tokens and their positions must be different inputs");
  tokens_ = embedding ? expected_embeddings(session) : expected_row(session, method_, token_input, inputs_.size(), "tokens");
  positions_ = expected_row(session, method_, position_input, inputs_.size(), "positions");
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    if (i != token_input && i != position_input && !inputs_[i]) refuse("input " + std::to_string(i) + " is not set");
  }
}

void TokenMethod::execute(const std::int64_t* tokens, std::int64_t count, std::int64_t position) {
  prepare(count);
  Bytes& bytes = inputs_[token_index_]->bytes();
  if (embedding_) {
    embedding_->embed(tokens, count, row(), bytes.data());
  } else {
    store(bytes, tokens_.type, tokens, count);
  }
  execute_prepared(position);
}

void TokenMethod::execute_rows(const std::uint8_t* rows, std::int64_t count, std::int64_t position) {
  prepare(count);
  std::memcpy(inputs_[token_index_]->bytes().data(), rows, static_cast<std::size_t>(count) * row().bytes());
  execute_prepared(position);
}

// Provides inputs for `count` tokens.
void TokenMethod::prepare(std::int64_t count) {
  if (count == count_) return;
  if (embedding_) {
    require_count(method_, token_index_, tokens_, most(), count);
    std::vector<std::int64_t> shape = tokens_.shape;
    shape[length_dim()] = count;
    inputs_[token_index_] = Input::tensor(tokens_.type, shape, tokens_.dim_order, Bytes(static_cast<std::size_t>(count) * row().bytes()));
  } else {
    inputs_[token_index_] = integers(method_, token_index_, tokens_, count);
  }
  inputs_[position_index_] = integers(method_, position_index_, positions_, takes_start() ? 1 : count);
  count_ = count;
}

void TokenMethod::execute_prepared(std::int64_t position) {
  const std::int64_t start = now_ns();
  Bytes& positions = inputs_[position_index_]->bytes();
  for (std::int64_t i = 0; i < (takes_start() ? 1 : count_); ++i) {
    const std::int64_t value = position + i;
    const auto narrow = static_cast<std::int32_t>(value);
    if (positions_.type == ScalarType::Int) {
      std::memcpy(positions.data() + static_cast<std::size_t>(i) * sizeof(narrow), &narrow, sizeof(narrow));
    } else {
      std::memcpy(positions.data() + static_cast<std::size_t>(i) * sizeof(value), &value, sizeof(value));
    }
  }
  method_.execute(inputs_);
  if (embedding_) part.add(start);
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

void TokenMethod::refuse(const std::string& why) const { refuse_method(method_, why); }

ExpectedTensor TokenMethod::expected_embeddings(Session& session) {
  const std::string input = "input " + std::to_string(token_index_) + " (embeddings)";
  if (token_index_ >= inputs_.size()) refuse(input + " does not exist: it takes " + std::to_string(inputs_.size()));
  if (!method_.input(token_index_).isTensor()) refuse(input + " is not a tensor");
  ExpectedTensor tensor = session.expected(method_, token_index_);
  const bool is_float = tensor.type == ScalarType::Float || tensor.type == ScalarType::Half || tensor.type == ScalarType::BFloat16;
  if (!is_float) refuse(input + " must be float32, float16 or bfloat16, not " + dtype_name(tensor.type));
  if (tensor.shape.size() != 3 || tensor.shape[0] != 1 || tensor.shape[1] < 1 || tensor.shape[2] < 1) {
    refuse(input + " must have the shape [1, tokens, width], not " + shape_text(tensor.shape));
  }
  return tensor;
}

Tensor TokenMethod::logits() {
  const EValue& value = method_.method().get_output(0);
  if (!value.isTensor() || value.toTensor().dim() == 0 || value.toTensor().numel() == 0) refuse("its first output must be logits");
  return value.toTensor();
}

LanguageModel::LanguageModel(Session& session, const ModelMethods& methods)
    : methods_(methods),
      embedding_(methods.embedding.empty() ? std::nullopt : std::optional<TokenEmbedding>(std::in_place, session, methods.embedding)),
      prefill_(session, methods.prefill, methods.token_input, methods.position_input, embedding_ ? &*embedding_ : nullptr) {
  for (const auto& name : methods.encoders) encoders_.push_back(std::make_unique<Encoder>(session, name));
  if (methods.decode != methods.prefill) {
    decode_.emplace(session, methods.decode, methods.token_input, methods.position_input, embedding_ ? &*embedding_ : nullptr);
  }
  latest_ = &prefill_;
}

std::int64_t LanguageModel::next_chunk(std::int64_t left) {
  const std::int64_t chunk = std::min({methods_.max_chunk, prefill_.most(), left});
  const bool together = chunk >= prefill_.least();
  latest_ = together ? &prefill_ : &decode();
  return together ? chunk : 1;
}

void LanguageModel::process(const std::vector<std::int64_t>& context, std::int64_t begin, std::int64_t end, std::int64_t shift) {
  while (begin < end) {
    const std::int64_t count = next_chunk(end - begin);
    latest_->execute(context.data() + begin, count, begin + shift);
    begin += count;
  }
}

std::int64_t LanguageModel::encode(std::int64_t position) {
  const std::int64_t first = position;
  for (const auto& encoder : encoders_) {
    const RowType row = prefill_.row();
    const std::int64_t positions = encoder->encode(row, rows_);
    for (std::int64_t done = 0; done < positions;) {
      const std::int64_t count = next_chunk(positions - done);
      latest_->execute_rows(rows_.data() + static_cast<std::size_t>(done) * row.bytes(), count, position);
      done += count;
      position += count;
    }
  }
  return position - first;
}

std::vector<Part> LanguageModel::take_parts() {
  std::vector<Part> parts;
  if (!embedding_) return parts;
  for (const auto& encoder : encoders_) parts.push_back(encoder->part.take());
  parts.push_back(embedding_->part.take());
  parts.push_back(prefill_.part.take());
  if (decode_) parts.push_back(decode_->part.take());
  return parts;
}

void LanguageModel::step(std::int64_t token, std::int64_t position) {
  latest_ = &decode();
  latest_->execute(&token, 1, position);
}

}  // namespace etfarm
