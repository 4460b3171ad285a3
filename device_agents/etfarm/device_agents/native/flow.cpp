#include "flow.h"

#include <algorithm>
#include <cstring>

#include "token_methods.h"

namespace etfarm {
namespace {

using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::runtime::EValue;

[[noreturn]] void refuse(LoadedMethod& method, const std::string& why) {
  throw Failure{"INPUT_MISMATCH", "method '" + method.name() + "' cannot generate text: " + why, "", {}};
}

// Returns the first output of the latest execution, which must be rows of the decoder's type.
Tensor rows_of(LoadedMethod& method, const RowType& row) {
  const EValue& value = method.method().get_output(0);
  if (!value.isTensor() || value.toTensor().dim() == 0 || value.toTensor().numel() == 0) refuse(method, "its first output must be embeddings");
  const Tensor tensor = value.toTensor();
  const std::vector<std::int64_t> shape(tensor.sizes().begin(), tensor.sizes().end());
  if (tensor.scalar_type() != row.type || shape.back() != row.width) {
    refuse(method, std::string("it returns ") + dtype_name(tensor.scalar_type()) + " " + shape_text(shape) + ", but '" + row.decoder + "' takes rows of " +
                       std::to_string(row.width) + " " + dtype_name(row.type) + " values");
  }
  const auto order = tensor.dim_order();
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (order[i] != i) refuse(method, "the embeddings that it returns are not contiguous");
  }
  return tensor;
}

}  // namespace

std::size_t RowType::bytes() const { return static_cast<std::size_t>(width) * item_bytes(type); }

TokenEmbedding::TokenEmbedding(Session& session, const std::string& name) : method_(session.loaded(name)), inputs_(session.inputs(name)) {
  tokens_ = expected_row(session, method_, 0, inputs_.size(), "tokens");
  for (std::size_t i = 1; i < inputs_.size(); ++i) {
    if (!inputs_[i]) refuse(method_, "input " + std::to_string(i) + " is not set");
  }
}

void TokenEmbedding::embed(const std::int64_t* tokens, std::int64_t count, const RowType& row, std::uint8_t* rows) {
  const std::int64_t most = tokens_.shape.back();
  for (std::int64_t done = 0; done < count;) {
    const std::int64_t chunk = std::min(most, count - done);
    const std::int64_t start = now_ns();
    if (chunk != count_) {
      inputs_[0] = integers(method_, 0, tokens_, chunk);
      count_ = chunk;
    }
    store(inputs_[0]->bytes(), tokens_.type, tokens + done, chunk);
    method_.execute(inputs_);
    const Tensor output = rows_of(method_, row);
    const std::size_t bytes = static_cast<std::size_t>(chunk) * row.bytes();
    if (output.nbytes() != bytes) {
      refuse(method_, "it returns " + std::to_string(output.nbytes() / row.bytes()) + " rows for " + std::to_string(chunk) + " tokens");
    }
    std::memcpy(rows + static_cast<std::size_t>(done) * row.bytes(), output.const_data_ptr(), bytes);
    part.add(start);
    done += chunk;
  }
}

Encoder::Encoder(Session& session, const std::string& name) : method_(session.loaded(name)), inputs_(session.inputs(name)) {
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    if (!inputs_[i]) refuse(method_, "input " + std::to_string(i) + " is not set");
  }
}

std::int64_t Encoder::encode(const RowType& row, Bytes& rows) {
  const std::int64_t start = now_ns();
  method_.execute(inputs_);
  const Tensor output = rows_of(method_, row);
  // A copy: methods that share memory may overwrite the output while its rows are executed in chunks.
  const auto* begin = static_cast<const std::uint8_t*>(output.const_data_ptr());
  rows.assign(begin, begin + output.nbytes());
  part.add(start);
  return static_cast<std::int64_t>(output.nbytes() / row.bytes());
}

}  // namespace etfarm
