#include "session.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <sys/mman.h>

#include <executorch/runtime/backend/interface.h>

#include "log.h"
#include "threadpool.h"

namespace etfarm {

using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::MethodMeta;
using executorch::runtime::Program;
using executorch::runtime::Tag;
using executorch::runtime::TensorInfo;

namespace {

using ByteSpans = executorch::runtime::Span<executorch::runtime::Span<std::uint8_t>>;

std::string error_name(Error error) {
  const char* name = executorch::runtime::to_string(error);
  constexpr std::string_view prefix = "Error::";
  return std::strncmp(name, prefix.data(), prefix.size()) == 0 ? name + prefix.size() : name;
}

const char* kind_name(Tag tag) {
  switch (tag) {
    case Tag::Tensor:
      return "tensor";
    case Tag::Int:
      return "int";
    case Tag::Double:
      return "double";
    case Tag::Bool:
      return "bool";
    case Tag::None:
      return "none";
    default:
      return "unsupported";
  }
}

// A scalar for a message, with as many digits as it takes to be the same number again.
std::string text_of(const EValue& scalar) {
  if (scalar.isInt()) return std::to_string(scalar.toInt());
  if (scalar.isBool()) return scalar.toBool() ? "true" : "false";
  if (!scalar.isDouble()) return "none";
  char text[32];
  for (int digits = 6; digits <= 17; ++digits) {
    std::snprintf(text, sizeof text, "%.*g", digits, scalar.toDouble());
    if (std::strtod(text, nullptr) == scalar.toDouble()) break;
  }
  return text;
}

bool backend_usable(const char* name) {
  const auto* backend = executorch::runtime::get_backend_class(name);
  return backend && backend->is_available();
}

// The operators that the runtime reported as missing while it loaded the method.
std::vector<std::string> missing_operators() {
  constexpr std::string_view mark = "Missing operator: [";
  std::vector<std::string> names;
  for (const auto& line : log::recent()) {
    const std::size_t at = line.find(mark);
    const std::size_t end = at == std::string::npos ? at : line.find("] ", at);
    if (end != std::string::npos) names.push_back(line.substr(end + 2));
  }
  return names;
}

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

// The planned buffer in which ExecuTorch's memory planner places state that methods share (share_mutable_buffers): with
// activations in the first one, every method of such a program has two, and the second is of equal size in all.
constexpr std::size_t kSharedBuffer = 1;

Json tensor_json(std::size_t index, const TensorInfo& info) {
  return Json()
      .number("index", static_cast<std::int64_t>(index))
      .text("kind", "tensor")
      .text("name", info.name())
      .text("dtype", dtype_name(info.scalar_type()))
      .numbers("shape", {info.sizes().begin(), info.sizes().end()})
      .numbers("dim_order", {info.dim_order().begin(), info.dim_order().end()})
      .number("size_bytes", static_cast<std::int64_t>(info.nbytes()))
      .boolean("planned", info.is_memory_planned());
}

}  // namespace

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Failure runtime_failure(const std::string& doing, Error error) {
  const std::string reason = log::reason();
  const std::string message = doing + ": ExecuTorch says " + error_name(error) + (reason.empty() ? "" : ": " + reason);
  return Failure{"RUNTIME", message, error_name(error), {}};
}

Pages::Pages(std::size_t size, For owner) : data_(nullptr), size_(size) {
  if (size == 0) return;
  // RLIMIT_DATA counts private writable mappings only.
  const int sharing = owner == For::Program ? MAP_PRIVATE : MAP_SHARED | MAP_NORESERVE;
  void* pages = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, sharing | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<std::uint8_t*>(pages);
}

Pages::~Pages() {
  if (data_) ::munmap(data_, size_);
}

LoadedMethod::LoadedMethod(const Program& program, const DataFiles& data, const std::string& name, bool trace, bool debug,
                           std::shared_ptr<Pages> shared)
    : name_(name), debug_(debug) {
  const MethodMeta meta = unwrap(program.method_meta(name.c_str()), "method '" + name + "'");
  std::vector<std::string> missing;
  for (std::size_t i = 0; i < meta.num_backends(); ++i) {
    const char* backend = unwrap(meta.get_backend_name(i), "backend " + std::to_string(i));
    if (!backend_usable(backend)) missing.emplace_back(backend);
  }
  if (!missing.empty()) throw Failure{"BACKEND_MISSING", "this runner has no backend " + joined(missing), "", missing};

  for (std::size_t i = 0; i < meta.num_memory_planned_buffers(); ++i) {
    const std::int64_t size = unwrap(meta.memory_planned_buffer_size(i), "planned buffer " + std::to_string(i));
    if (size < 0) throw Failure{"RUNTIME", "planned buffer " + std::to_string(i) + " has a negative size", "InvalidProgram", {}};
    const bool is_shared = i == kSharedBuffer && shared && shared->size() == static_cast<std::size_t>(size);
    pages_.push_back(is_shared ? shared : std::make_shared<Pages>(static_cast<std::size_t>(size)));
  }
  for (const auto& pages : pages_) spans_.emplace_back(pages->data(), pages->size());
  planned_ = std::make_unique<executorch::runtime::HierarchicalAllocator>(ByteSpans(spans_.data(), spans_.size()));
  manager_ = std::make_unique<executorch::runtime::MemoryManager>(&method_allocator_, planned_.get(), &temp_allocator_);
  if (trace) {
    tracer_ = std::make_unique<executorch::etdump::ETDumpGen>();
    if (debug) tracer_->set_event_tracer_debug_level(executorch::runtime::EventTracerDebugLogLevel::kIntermediateOutputs);
  }

  const auto own = program.get_named_data_map();
  data.take_missing(nullptr);  // discard those of an earlier method
  const std::int64_t start = now_ns();
  auto method = program.load_method(name.c_str(), manager_.get(), tracer_.get(), &data);
  load_method_ns = now_ns() - start;
  if (!method.ok()) {
    if (method.error() == Error::OperatorMissing) {
      const auto operators = missing_operators();
      throw Failure{"OPERATOR_MISSING", "this runner has no kernel for " + joined(operators), error_name(method.error()), operators};
    }
    const auto missing_data = data.take_missing(own.ok() ? *own : nullptr);
    if (!missing_data.empty()) {
      throw Failure{"DATA_MISSING", "no data file has " + joined(missing_data), error_name(method.error()), missing_data};
    }
    throw runtime_failure("method '" + name + "' cannot be loaded", method.error());
  }
  method_.emplace(std::move(*method));
  provide_outputs();
}

// A program that was exported without planned outputs expects the caller to allocate them.
void LoadedMethod::provide_outputs() {
  const MethodMeta meta = method_->method_meta();
  for (std::size_t i = 0; i < meta.num_outputs(); ++i) {
    const EValue& value = method_->get_output(i);
    if (!value.isTensor() || value.toTensor().const_data_ptr() || value.toTensor().nbytes() == 0) continue;
    const TensorInfo info = unwrap(meta.output_tensor_meta(i), "output " + std::to_string(i));
    if (info.is_memory_planned()) continue;
    Pages pages(info.nbytes());
    if (method_->set_output_data_ptr(pages.data(), pages.size(), i) == Error::Ok) outputs_.push_back(std::move(pages));
  }
}

// get_input() is deprecated for callers that write through it, but is the only way to know whether a shape is dynamic.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
const EValue& LoadedMethod::input(std::size_t index) { return method_->get_input(index); }
#pragma GCC diagnostic pop

bool LoadedMethod::is_dynamic(std::size_t index) {
  const EValue& value = input(index);
  return value.isTensor() && value.toTensor().shape_dynamism() != executorch::aten::TensorShapeDynamism::STATIC;
}

Span LoadedMethod::execute(const std::vector<std::optional<Input>>& inputs) {
  // The memory planner reuses an input's bytes after its last use: the next run would read activations.
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const EValue& value = inputs[i]->value();
    const Error error = method_->set_input(value, i);
    if (error != Error::Ok) throw runtime_failure("input " + std::to_string(i) + " was refused", error);
  }
  Span span{now_ns(), 0};
  const Error error = method_->execute();
  span.end = now_ns();
  if (error != Error::Ok) throw runtime_failure("method '" + name_ + "' failed", error);
  if (!first_run_ns) first_run_ns = span.ns();
  return span;
}

Json Session::load(const std::string& path, const std::vector<std::string>& data) {
  if (program_) throw Failure{"BAD_STATE", "a program is loaded already; a runner process serves one", "", {}};
  // The pool's size is fixed before XNNPACK sees it: resetting it later can hang.
  const std::size_t threads = thread_count();

  const std::int64_t start = now_ns();
  data_ = std::make_unique<DataFiles>(data);
  loader_ = map_file(path);
  // With Minimal, the default, one in eight damaged files crashes or hangs the process; this check costs microseconds.
  program_.emplace(unwrap(Program::load(loader_.get(), Program::Verification::InternalConsistency), "cannot load the program"));
  const std::int64_t load_ns = now_ns() - start;

  std::vector<std::string> methods;
  for (std::size_t i = 0; i < program_->num_methods(); ++i) {
    methods.emplace_back(unwrap(program_->get_method_name(i), "method " + std::to_string(i)));
  }
  shared_bytes_ = shared_state_bytes(methods);
  return Json().number("load_ns", load_ns).texts("methods", methods).number("threads", static_cast<std::int64_t>(threads));
}

MethodMeta Session::meta(const std::string& method) {
  if (!program_) throw Failure{"BAD_STATE", "no program is loaded", "", {}};
  return unwrap(program_->method_meta(method.c_str()), "no method '" + method + "'");
}

// The file does not say whether its methods share state, but only the planner for shared state produces such sizes.
std::size_t Session::shared_state_bytes(const std::vector<std::string>& methods) {
  std::int64_t size = 0;
  std::size_t count = 0;
  for (const auto& name : methods) {
    const MethodMeta meta = this->meta(name);
    const std::size_t buffers = meta.num_memory_planned_buffers();
    if (buffers < kSharedBuffer + 1) continue;
    const std::int64_t own = unwrap(meta.memory_planned_buffer_size(kSharedBuffer), "a planned buffer of '" + name + "'");
    if (buffers > kSharedBuffer + 1 || (count > 0 && own != size)) return 0;
    size = own;
    ++count;
  }
  return count > 1 && size > 0 ? static_cast<std::size_t>(size) : 0;
}

Json Session::describe(const std::string& name) {
  const MethodMeta meta = this->meta(name);
  const auto known = methods_.find(name);
  LoadedMethod* loaded = known == methods_.end() ? nullptr : known->second.get();

  const auto describe_value = [](std::size_t index, Tag tag) {
    return Json().number("index", static_cast<std::int64_t>(index)).text("kind", kind_name(tag));
  };
  std::vector<Json> inputs;
  for (std::size_t i = 0; i < meta.num_inputs(); ++i) {
    const Tag tag = unwrap(meta.input_tag(i), "input " + std::to_string(i));
    if (tag == Tag::Tensor) {
      inputs.push_back(tensor_json(i, unwrap(meta.input_tensor_meta(i), "input " + std::to_string(i))));
      loaded ? inputs.back().boolean("dynamic", loaded->is_dynamic(i)) : inputs.back().null("dynamic");
    } else {
      inputs.push_back(describe_value(i, tag));
    }
  }
  std::vector<Json> outputs;
  for (std::size_t i = 0; i < meta.num_outputs(); ++i) {
    const Tag tag = unwrap(meta.output_tag(i), "output " + std::to_string(i));
    outputs.push_back(tag == Tag::Tensor ? tensor_json(i, unwrap(meta.output_tensor_meta(i), "output " + std::to_string(i)))
                                         : describe_value(i, tag));
  }
  std::vector<std::int64_t> planned;
  for (std::size_t i = 0; i < meta.num_memory_planned_buffers(); ++i) {
    planned.push_back(unwrap(meta.memory_planned_buffer_size(i), "planned buffer " + std::to_string(i)));
  }
  std::vector<std::string> backends;
  for (std::size_t i = 0; i < meta.num_backends(); ++i) {
    backends.emplace_back(unwrap(meta.get_backend_name(i), "backend " + std::to_string(i)));
  }
  return Json().text("name", name).objects("inputs", inputs).objects("outputs", outputs).numbers("planned_bytes", planned).texts("backends", backends);
}

Json Session::load_method(const std::string& name, bool trace, bool debug, bool keep) {
  const std::size_t count = meta(name).num_inputs();
  if (debug && !trace) throw Failure{"BAD_COMMAND", "debug=1 needs trace=1", "", {}};
  method_ = nullptr;
  keep ? void(methods_.erase(name)) : methods_.clear();  // before loading, so that both are never in memory at once
  if (methods_.empty()) shared_.reset();
  if (shared_bytes_ > 0 && !shared_) shared_ = std::make_shared<Pages>(shared_bytes_);
  auto loaded = std::make_unique<LoadedMethod>(*program_, *data_, name, trace, debug, shared_);
  method_ = loaded.get();
  methods_[name] = std::move(loaded);
  inputs_[name].resize(count);
  return Json().number("load_method_ns", method_->load_method_ns);
}

void Session::select(const std::string& name) { method_ = &loaded(name); }

LoadedMethod& Session::loaded(const std::string& name) {
  const auto known = methods_.find(name);
  if (known == methods_.end()) throw Failure{"BAD_STATE", "method '" + name + "' is not loaded", "", {}};
  return *known->second;
}

LoadedMethod& Session::loaded_method() {
  if (!method_) throw Failure{"BAD_STATE", "no method is loaded", "", {}};
  return *method_;
}

LoadedMethod& Session::ready() {
  LoadedMethod& method = loaded_method();
  const auto& values = inputs_[method.name()];
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (!values[i]) throw Failure{"INPUT_MISMATCH", "input " + std::to_string(i) + " of " + std::to_string(values.size()) + " is not set", "", {}};
  }
  return method;
}

ExpectedTensor Session::expected(LoadedMethod& method, std::size_t index) {
  const std::string what = "input " + std::to_string(index);
  const TensorInfo info = unwrap(meta(method.name()).input_tensor_meta(index), what);
  return {index, std::string(info.name()), info.scalar_type(), {info.sizes().begin(), info.sizes().end()},
          {info.dim_order().begin(), info.dim_order().end()}, method.is_dynamic(index)};
}

void Session::set_input(Command& command) {
  LoadedMethod& method = loaded_method();
  auto& inputs = inputs_[method.name()];
  const auto index = static_cast<std::size_t>(command.integer("index", 0, 1 << 20));
  const auto kind = command.take("kind").value_or("tensor");
  if (index >= inputs.size()) {
    throw Failure{"INPUT_MISMATCH",
                  "there is no input " + std::to_string(index) + ": method '" + method.name() + "' takes " + std::to_string(inputs.size()), "", {}};
  }
  const EValue& baked = method.input(index);
  if (kind != kind_name(baked.tag)) {
    throw Failure{"INPUT_MISMATCH", "input " + std::to_string(index) + " must be " + kind_name(baked.tag) + ", not " + kind, "", {}};
  }
  if (kind == "tensor") {
    const std::string dtype = command.require("dtype");
    const auto shape = command.integers("shape", 0, INT32_MAX);
    const auto dim_order = command.integers("dim_order", 0, 255);
    command.finish();
    inputs[index] = checked_tensor(expected(method, index), dtype, shape, dim_order, std::move(command.payload));
    return;
  }
  EValue value;
  bool same = true;
  if (kind == "int") {
    value = EValue(command.integer("value", INT64_MIN, INT64_MAX));
    same = value.toInt() == baked.toInt();
  } else if (kind == "bool") {
    value = EValue(command.flag("value", false));
    same = value.toBool() == baked.toBool();
  } else if (kind == "double") {
    const std::string text = command.require("value");
    char* end = nullptr;
    const double number = std::strtod(text.c_str(), &end);
    if (text.empty() || *end != '\0') throw Failure{"BAD_COMMAND", "value must be a number", "", {}};
    value = EValue(number);
    same = number == baked.toDouble() || (number != number && baked.toDouble() != baked.toDouble());
  } else if (kind != "none") {
    throw Failure{"INPUT_MISMATCH", "input " + std::to_string(index) + " is of a kind that etfarm does not carry", "", {}};
  }
  command.finish();
  // The exporter makes scalars constants; another value would require another program.
  if (!same) {
    throw Failure{"INPUT_MISMATCH", "input " + std::to_string(index) + " must be " + text_of(baked) + ", a constant of the exported program", "", {}};
  }
  inputs[index] = Input::scalar(std::move(value));
}

void Session::default_inputs(std::uint64_t seed, std::vector<Json>& headers, Bytes& payload) {
  LoadedMethod& method = loaded_method();
  auto& inputs = inputs_[method.name()];
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    std::string name;
    if (method.input(i).isTensor()) {
      const ExpectedTensor tensor = expected(method, i);
      if (item_bytes(tensor.type) == 0) throw Failure{"INPUT_MISMATCH", "input " + std::to_string(i) + " has a dtype that etfarm does not carry", "", {}};
      std::size_t elements = 1;
      for (const auto size : tensor.shape) elements *= static_cast<std::size_t>(size);
      inputs[i] = Input::tensor(tensor.type, tensor.shape, tensor.dim_order, default_data(tensor.type, elements, seed, i));
      name = tensor.name;
    } else {
      inputs[i] = Input::scalar(method.input(i));
    }
    append_value(inputs[i]->value(), name, headers, payload);
  }
}

void Session::outputs(std::vector<Json>& headers, Bytes& payload) {
  LoadedMethod& method = loaded_method();
  if (!method.first_run_ns) throw Failure{"BAD_STATE", "the method has not run since it was loaded", "", {}};
  const MethodMeta meta = this->meta(method.name());
  for (std::size_t i = 0; i < meta.num_outputs(); ++i) {
    const auto info = meta.output_tensor_meta(i);
    append_value(method.method().get_output(i), info.ok() ? std::string(info->name()) : "", headers, payload);
  }
}

}  // namespace etfarm
