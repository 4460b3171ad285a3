// Tensors and scalars as the protocol carries them, and the checks that ExecuTorch itself does not make on inputs.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <executorch/runtime/core/evalue.h>
#include <executorch/runtime/executor/method_meta.h>

#include "wire.h"

namespace etfarm {

// torch's name of a dtype; "unsupported" if the protocol does not carry it.
const char* dtype_name(executorch::aten::ScalarType type);
// Bytes of one element; 0 if unsupported.
std::size_t item_bytes(executorch::aten::ScalarType type);
std::string shape_text(const std::vector<std::int64_t>& shape);

// One input from the caller. It outlives reloads of its method, so it owns everything that an EValue points to.
class Input {
 public:
  static Input scalar(executorch::runtime::EValue value);
  static Input tensor(executorch::aten::ScalarType type, std::vector<std::int64_t> shape, std::vector<std::uint8_t> dim_order, Bytes data);

  const executorch::runtime::EValue& value() const { return value_; }
  Bytes& bytes();  // the elements of a tensor, which may be changed between executions

 private:
  struct Storage;
  Input() = default;
  std::shared_ptr<Storage> storage_;
  executorch::runtime::EValue value_;
};

// A method's description of one of its tensor inputs. `dynamic`: dims may be smaller than `shape`, which is then the bound.
struct ExpectedTensor {
  std::size_t index;
  std::string name;
  executorch::aten::ScalarType type;
  std::vector<std::int64_t> shape;
  std::vector<std::uint8_t> dim_order;
  bool dynamic;
};

// Returns the input for `expected`; a Failure INPUT_MISMATCH names the difference.
Input checked_tensor(const ExpectedTensor& expected, const std::string& dtype, const std::vector<std::int64_t>& shape,
                     const std::vector<std::int64_t>& dim_order, Bytes data);

// Generates floats uniform in [0, 1) by splitmix64 over seed and index, integers 0, bools false: equal on every machine.
Bytes default_data(executorch::aten::ScalarType type, std::size_t elements, std::uint64_t seed, std::size_t index);

// Appends a value's header to `headers` and its bytes to `payload`; offsets count from the start of the payload.
void append_value(const executorch::runtime::EValue& value, const std::string& name, std::vector<Json>& headers, Bytes& payload);

}  // namespace etfarm
