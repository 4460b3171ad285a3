// The one program of this process and its loaded methods, one of which is the current one.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <executorch/devtools/etdump/etdump_flatcc.h>
#include <executorch/extension/memory_allocator/malloc_memory_allocator.h>
#include <executorch/runtime/executor/program.h>

#include "data.h"
#include "values.h"
#include "wire.h"

namespace etfarm {

std::int64_t now_ns();  // steady_clock

// Returns the Failure for an ExecuTorch error: its name, and the line that the runtime logged about it.
Failure runtime_failure(const std::string& doing, executorch::runtime::Error error);

// Returns the value, or throws the Failure that names the operation.
template <typename T>
T unwrap(executorch::runtime::Result<T>&& result, const std::string& doing) {
  if (!result.ok()) throw runtime_failure(doing, result.error());
  return std::move(*result);
}

// Zeroed pages that are touched only when used, so that a large plan costs only the memory that the method writes.
class Pages {
 public:
  // The program's memory is under its limit; the runner's own must not be, or it would reduce the program's budget.
  enum class For { Program, Us };
  explicit Pages(std::size_t size, For owner = For::Program);
  Pages(Pages&& other) noexcept : data_(other.data_), size_(other.size_) { other.data_ = nullptr; }
  Pages& operator=(Pages&&) = delete;
  ~Pages();
  std::uint8_t* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  std::uint8_t* data_;
  std::size_t size_;
};

// The interval from just before an execution to just after it, by now_ns().
struct Span {
  std::int64_t start;
  std::int64_t end;
  std::int64_t ns() const { return end - start; }
};

// A method with its memory. Destroying it resets its mutable buffers, but for those in `shared`, its second planned buffer where
// the program's methods share state.
class LoadedMethod {
 public:
  LoadedMethod(const executorch::runtime::Program& program, const DataFiles& data, const std::string& name, bool trace, bool debug,
               std::shared_ptr<Pages> shared);

  const std::string& name() const { return name_; }
  executorch::runtime::Method& method() { return *method_; }
  executorch::etdump::ETDumpGen* tracer() { return tracer_.get(); }
  bool debugging() const { return debug_; }
  bool is_dynamic(std::size_t input);
  // The value that the program was exported with, for inputs other than tensors.
  const executorch::runtime::EValue& input(std::size_t index);

  // Executes once. Inputs are set again before, which is not part of the time.
  Span execute(const std::vector<std::optional<Input>>& inputs);

  std::optional<std::int64_t> first_run_ns;  // duration of the first execution since loading
  std::int64_t load_method_ns = 0;

 private:
  void provide_outputs();

  std::string name_;
  bool debug_;
  std::vector<std::shared_ptr<Pages>> pages_;
  std::vector<executorch::runtime::Span<std::uint8_t>> spans_;
  executorch::extension::MallocMemoryAllocator method_allocator_;
  executorch::extension::MallocMemoryAllocator temp_allocator_;
  std::unique_ptr<executorch::runtime::HierarchicalAllocator> planned_;
  std::unique_ptr<executorch::runtime::MemoryManager> manager_;
  std::unique_ptr<executorch::etdump::ETDumpGen> tracer_;
  std::vector<Pages> outputs_;
  std::optional<executorch::runtime::Method> method_;  // last member: it points into everything above
};

class Session {
 public:
  Json load(const std::string& path, const std::vector<std::string>& data);
  Json describe(const std::string& method);
  // With `keep`, methods that were loaded before stay loaded, each in its own memory but for state that the methods share.
  Json load_method(const std::string& name, bool trace, bool debug, bool keep);
  // Makes a loaded method the current one, with its state unchanged.
  void select(const std::string& name);
  void set_input(Command& command);
  void default_inputs(std::uint64_t seed, std::vector<Json>& headers, Bytes& payload);
  void outputs(std::vector<Json>& headers, Bytes& payload);

  bool loaded() const { return program_.has_value(); }
  // Returns a loaded method; a Failure if it is not loaded.
  LoadedMethod& loaded(const std::string& name);
  // Returns the current method, ready to execute; a Failure if there is none or an input is missing.
  LoadedMethod& ready();
  const std::vector<std::optional<Input>>& inputs() { return inputs(loaded_method().name()); }
  const std::vector<std::optional<Input>>& inputs(const std::string& method) { return inputs_[method]; }
  // Describes an input of a loaded method, which must be a tensor.
  ExpectedTensor expected(LoadedMethod& method, std::size_t index);

 private:
  LoadedMethod& loaded_method();
  executorch::runtime::MethodMeta meta(const std::string& method);
  std::size_t shared_state_bytes(const std::vector<std::string>& methods);

  std::unique_ptr<executorch::extension::MmapDataLoader> loader_;
  std::unique_ptr<DataFiles> data_;
  std::optional<executorch::runtime::Program> program_;
  std::size_t shared_bytes_ = 0;   // size of the state that the program's methods share; 0 if they share none
  std::shared_ptr<Pages> shared_;  // this state, as long as a method is loaded
  std::map<std::string, std::unique_ptr<LoadedMethod>> methods_;
  LoadedMethod* method_ = nullptr;  // the current one
  std::map<std::string, std::vector<std::optional<Input>>> inputs_;
};

}  // namespace etfarm
