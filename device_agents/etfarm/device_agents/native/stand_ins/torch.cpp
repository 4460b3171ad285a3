// Stand-ins for the symbols of torch that ExecuTorch's library of custom operators needs while it is loaded.
//
// The library has each kernel twice: for ExecuTorch, and wrapped for PyTorch, which exports models with it. Its initialisers
// register both. The declarations below have the names, the parameters and the way of returning that PyTorch's headers give
// them, so that the compiler generates the symbols that the library refers to; they register nothing. The wrappers refer to
// more functions of torch, which are bound when they are first called, so never.
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace c10 {

// The library's own code destroys the objects that these functions return or initialise: strings, vectors and pointers whose
// bytes are all 0 own nothing.
template <std::size_t kSize>
struct Zeros {
  alignas(8) unsigned char bytes[kSize] = {};
};

enum class DispatchKey : std::uint16_t {};
struct OperatorName;
struct FunctionSchema : Zeros<120> {};  // sizeof in torch 2.13

template <typename T>
struct ArrayRef {
  const T* data;
  std::size_t size;
};

// The pointers to types. The destructor makes the compiler return the one that is counted in memory, as torch does.
struct Counted : Zeros<16> {
  ~Counted() {}
};
using Single = void*;

struct Type {
  template <typename T>
  struct SingletonOrSharedTypePtr {
    ~SingletonOrSharedTypePtr() {}
    T* pointer;
  };
};

struct TensorType {
  static const Counted& get();
};
struct StringType {
  static Single get();
};
struct IntType {
  static Single get();
};
struct BoolType {
  static Single get();
};
struct FloatType {
  static Single get();
};
struct OptionalType {
  static Counted get(Type::SingletonOrSharedTypePtr<Type> contained);
};

const Counted& TensorType::get() {
  static const Counted type;
  return type;
}
Single StringType::get() { return nullptr; }
Single IntType::get() { return nullptr; }
Single BoolType::get() { return nullptr; }
Single FloatType::get() { return nullptr; }
Counted OptionalType::get(Type::SingletonOrSharedTypePtr<Type>) { return {}; }

struct alignas(64) UndefinedTensorImpl : Zeros<192> {
  static UndefinedTensorImpl _singleton;
};
UndefinedTensorImpl UndefinedTensorImpl::_singleton;

namespace detail::infer_schema {

struct ArgumentDef;
FunctionSchema make_function_schema(ArrayRef<ArgumentDef>, ArrayRef<ArgumentDef>) { return {}; }

}  // namespace detail::infer_schema
}  // namespace c10

namespace torch {
namespace headeronly {
enum class Tag {};
}  // namespace headeronly

enum class _RegisterOrVerify {};

class CppFunction {
 public:
  ~CppFunction();
};
CppFunction::~CppFunction() {}

class Library : c10::Zeros<120> {  // sizeof in torch 2.13
 public:
  enum Kind {};
  Library(Kind, std::string, std::optional<c10::DispatchKey>, const char*, std::uint32_t);
  Library& _def(c10::FunctionSchema&&, c10::OperatorName*, const std::vector<headeronly::Tag>&, _RegisterOrVerify) &;
  Library& _impl(const char*, CppFunction&&, _RegisterOrVerify) &;
};
Library::Library(Kind, std::string, std::optional<c10::DispatchKey>, const char*, std::uint32_t) {}
Library& Library::_def(c10::FunctionSchema&&, c10::OperatorName*, const std::vector<headeronly::Tag>&, _RegisterOrVerify) & {
  return *this;
}
Library& Library::_impl(const char*, CppFunction&&, _RegisterOrVerify) & { return *this; }

namespace jit {
c10::FunctionSchema parseSchema(const std::string&, bool) { return {}; }
}  // namespace jit
}  // namespace torch
