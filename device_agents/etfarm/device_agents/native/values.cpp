#include "values.h"

#include <cstdio>
#include <cstring>

#include <executorch/runtime/core/exec_aten/exec_aten.h>
#include <executorch/runtime/core/exec_aten/util/dim_order_util.h>

namespace etfarm {

using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::aten::TensorImpl;
using executorch::runtime::EValue;
using executorch::runtime::Tag;

namespace {

struct Dtype {
  ScalarType type;
  const char* name;
  std::size_t bytes;
};

constexpr Dtype kDtypes[] = {
    {ScalarType::Bool, "bool", 1},         {ScalarType::Byte, "uint8", 1},
    {ScalarType::Char, "int8", 1},         {ScalarType::Float8_e4m3fn, "float8_e4m3fn", 1},
    {ScalarType::Float8_e5m2, "float8_e5m2", 1}, {ScalarType::Short, "int16", 2},
    {ScalarType::UInt16, "uint16", 2},     {ScalarType::Half, "float16", 2},
    {ScalarType::BFloat16, "bfloat16", 2}, {ScalarType::Int, "int32", 4},
    {ScalarType::UInt32, "uint32", 4},     {ScalarType::Float, "float32", 4},
    {ScalarType::Long, "int64", 8},        {ScalarType::UInt64, "uint64", 8},
    {ScalarType::Double, "float64", 8},
};

const Dtype* find(ScalarType type) {
  for (const auto& dtype : kDtypes) {
    if (dtype.type == type) return &dtype;
  }
  return nullptr;
}

// The dims in their memory order, without those of size 1, whose position has no effect.
std::vector<std::int64_t> physical_order(const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& order) {
  std::vector<std::int64_t> kept;
  for (const auto dim : order) {
    if (shape[static_cast<std::size_t>(dim)] != 1) kept.push_back(dim);
  }
  return kept;
}

std::uint64_t splitmix64(std::uint64_t& state) {
  state += 0x9E3779B97F4A7C15ULL;
  std::uint64_t z = state;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

template <typename T, typename Make>
void fill(Bytes& data, Make make) {
  for (std::size_t at = 0; at < data.size(); at += sizeof(T)) {
    const T value = make();
    std::memcpy(data.data() + at, &value, sizeof(T));
  }
}

}  // namespace

const char* dtype_name(ScalarType type) {
  const Dtype* dtype = find(type);
  return dtype ? dtype->name : "unsupported";
}

std::size_t item_bytes(ScalarType type) {
  const Dtype* dtype = find(type);
  return dtype ? dtype->bytes : 0;
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (const auto size : shape) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(size);
  }
  return text + "]";
}

struct Input::Storage {
  std::vector<TensorImpl::SizesType> sizes;
  std::vector<TensorImpl::DimOrderType> dim_order;
  std::vector<TensorImpl::StridesType> strides;
  Bytes data;
  std::unique_ptr<TensorImpl> impl;
};

Input Input::scalar(EValue value) {
  Input input;
  input.value_ = std::move(value);
  return input;
}

Input Input::tensor(ScalarType type, std::vector<std::int64_t> shape, std::vector<std::uint8_t> dim_order, Bytes data) {
  Input input;
  input.storage_ = std::make_shared<Storage>();
  Storage& storage = *input.storage_;
  storage.sizes.assign(shape.begin(), shape.end());
  storage.dim_order = std::move(dim_order);
  storage.strides.resize(shape.size());
  storage.data = std::move(data);
  if (!shape.empty()) {
    executorch::runtime::dim_order_to_stride_nocheck(storage.sizes.data(), storage.dim_order.data(), shape.size(), storage.strides.data());
  }
  storage.impl = std::make_unique<TensorImpl>(type, static_cast<ssize_t>(shape.size()), storage.sizes.data(), storage.data.data(),
                                              storage.dim_order.data(), storage.strides.data());
  input.value_ = EValue(Tensor(storage.impl.get()));
  return input;
}

Bytes& Input::bytes() { return storage_->data; }

Input checked_tensor(const ExpectedTensor& expected, const std::string& dtype, const std::vector<std::int64_t>& shape,
                     const std::vector<std::int64_t>& dim_order, Bytes data) {
  const std::string who = "input " + std::to_string(expected.index) + (expected.name.empty() ? "" : " '" + expected.name + "'");
  const auto refuse = [&](const std::string& what) { throw Failure{"INPUT_MISMATCH", who + " " + what, "", {}}; };

  const Dtype* wanted = find(expected.type);
  if (!wanted) refuse("has a dtype that etfarm does not carry");
  if (dtype != wanted->name) refuse("must be " + std::string(wanted->name) + ", not " + dtype);
  if (shape.size() != expected.shape.size()) {
    refuse("must have " + std::to_string(expected.shape.size()) + " dims " + shape_text(expected.shape) + ", not " +
           std::to_string(shape.size()) + " " + shape_text(shape));
  }
  std::size_t bytes = wanted->bytes;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    const bool fits = expected.dynamic ? shape[d] <= expected.shape[d] : shape[d] == expected.shape[d];
    if (!fits) {
      refuse("must have the shape " + shape_text(expected.shape) + (expected.dynamic ? " at most" : "") + ", not " + shape_text(shape));
    }
    bytes *= static_cast<std::size_t>(shape[d]);  // cannot overflow: bounded by the program's own tensor
  }

  std::vector<bool> seen(shape.size());
  bool is_order = dim_order.size() == shape.size();
  for (const auto dim : dim_order) {
    if (!is_order) break;
    is_order = dim >= 0 && static_cast<std::size_t>(dim) < shape.size() && !seen[static_cast<std::size_t>(dim)];
    if (is_order) seen[static_cast<std::size_t>(dim)] = true;
  }
  if (!is_order) refuse("has the dim order " + shape_text(dim_order) + ", which is no order of its " + std::to_string(shape.size()) + " dims");
  // ExecuTorch accepts any dim order but reads the bytes in the program's own, which gives wrong numbers without an error.
  const std::vector<std::int64_t> wanted_order(expected.dim_order.begin(), expected.dim_order.end());
  if (bytes > 0 && physical_order(shape, dim_order) != physical_order(shape, wanted_order)) {
    refuse("must lie in memory in the dim order " + shape_text(wanted_order) + ", not " + shape_text(dim_order));
  }
  if (data.size() != bytes) {
    refuse("has " + std::to_string(data.size()) + " bytes where " + wanted->name + " " + shape_text(shape) + " needs " + std::to_string(bytes));
  }
  return Input::tensor(expected.type, shape, expected.dim_order, std::move(data));
}

Bytes default_data(ScalarType type, std::size_t elements, std::uint64_t seed, std::size_t index) {
  Bytes data(elements * item_bytes(type));
  std::uint64_t state = seed ^ (0xD1342543DE82EF95ULL * (index + 1));
  // 24 bits make every float32 exact; narrower types take the bits that they represent exactly below 1.
  const auto uniform = [&state](int bits) {
    return static_cast<double>(splitmix64(state) >> (64 - bits)) / static_cast<double>(std::uint64_t{1} << bits);
  };
  switch (type) {
    case ScalarType::Float:
      fill<float>(data, [&] { return static_cast<float>(uniform(24)); });
      break;
    case ScalarType::Double:
      fill<double>(data, [&] { return uniform(53); });
      break;
    case ScalarType::Half:
      fill<executorch::aten::Half>(data, [&] { return executorch::aten::Half(static_cast<float>(uniform(11))); });
      break;
    case ScalarType::BFloat16:
      fill<executorch::aten::BFloat16>(data, [&] { return executorch::aten::BFloat16(static_cast<float>(uniform(8))); });
      break;
    default:
      break;  // in every other dtype, zero bytes are 0, false or 0.0
  }
  return data;
}

void append_value(const EValue& value, const std::string& name, std::vector<Json>& headers, Bytes& payload) {
  Json header;
  header.number("index", static_cast<std::int64_t>(headers.size())).text("name", name);
  switch (value.tag) {
    case Tag::Tensor: {
      const Tensor tensor = value.toTensor();
      const std::size_t size = item_bytes(tensor.scalar_type()) * static_cast<std::size_t>(tensor.numel());
      if (size > 0 && !tensor.const_data_ptr()) {
        throw Failure{"RUNTIME", "output " + std::to_string(headers.size()) + " has no memory behind it", "", {}};
      }
      header.text("kind", "tensor")
          .text("dtype", dtype_name(tensor.scalar_type()))
          .numbers("shape", {tensor.sizes().begin(), tensor.sizes().end()})
          .numbers("dim_order", {tensor.dim_order().begin(), tensor.dim_order().end()})
          .number("offset", static_cast<std::int64_t>(payload.size()))
          .number("size_bytes", static_cast<std::int64_t>(size));
      if (size > 0) {
        const auto* data = static_cast<const std::uint8_t*>(tensor.const_data_ptr());
        payload.insert(payload.end(), data, data + size);
      }
      break;
    }
    case Tag::Int:
      // As text, because some JSON readers lose bits of 64-bit numbers; doubles as their bits.
      header.text("kind", "int").text("value", std::to_string(value.toInt()));
      break;
    case Tag::Double: {
      char text[40];
      std::snprintf(text, sizeof(text), "%a", value.toDouble());
      header.text("kind", "double").text("value", text);
      break;
    }
    case Tag::Bool:
      header.text("kind", "bool").text("value", value.toBool() ? "1" : "0");
      break;
    case Tag::None:
      header.text("kind", "none");
      break;
    default:
      header.text("kind", "unsupported");
  }
  headers.push_back(std::move(header));
}

}  // namespace etfarm
