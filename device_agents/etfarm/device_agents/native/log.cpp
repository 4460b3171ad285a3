#include "log.h"

#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>

#include <executorch/runtime/platform/platform.h>
#include <executorch/runtime/platform/runtime.h>

#include "wire.h"

namespace etfarm::log {
namespace {

constexpr std::size_t kKept = 40;
// A kernel that logs in every iteration must not flood the output during a measurement.
constexpr int kSentPerCommand = 200;

std::mutex guard;
std::deque<std::string>& lines() {
  static auto* kept = new std::deque<std::string>();
  return *kept;
}
std::string& cause() {
  static auto* kept = new std::string();
  return *kept;
}
std::string& place() {
  static auto* kept = new std::string();
  return *kept;
}
int sent = 0;

void keep_and_send(char level, const char* file, std::size_t line, std::string message) {
  const char* slash = file ? std::strrchr(file, '/') : nullptr;
  const std::string where = file ? std::string(slash ? slash + 1 : file) + ":" + std::to_string(line) : "";
  {
    const std::lock_guard<std::mutex> lock(guard);
    lines().push_back(message);
    if (level == 'E' || level == 'F') {
      if (cause().empty()) {
        cause() = message;
      } else if (place().empty() && message.find("failed at instruction") != std::string::npos) {
        place() = message;
      }
    }
    if (lines().size() > kKept) lines().pop_front();
    if (level != 'F' && ++sent > kSentPerCommand) return;
  }
  Channel::get().send(Json().text("event", "log").text("level", std::string(1, level)).text("where", where).text("message", message));
}

void emit(et_timestamp_t, et_pal_log_level_t level, const char* file, const char*, std::size_t line, const char* message, std::size_t length) {
  keep_and_send(static_cast<char>(level), file, line, std::string(message, length));
}

[[noreturn]] void terminate() {
  std::string what = "terminated without an exception";
  if (const auto current = std::current_exception()) {
    try {
      std::rethrow_exception(current);
    } catch (const std::exception& error) {
      what = std::string("uncaught C++ exception: ") + error.what();
    } catch (...) {
      what = "uncaught C++ exception of an unknown type";
    }
  }
  keep_and_send('F', nullptr, 0, what);
  std::abort();
}

}  // namespace

void capture() {
  executorch::runtime::runtime_init();
  executorch::runtime::register_pal(executorch::runtime::PalImpl::create(emit, __FILE__));
  std::set_terminate(terminate);
}

void begin_command() {
  const std::lock_guard<std::mutex> lock(guard);
  lines().clear();
  cause().clear();
  place().clear();
  sent = 0;
}

std::vector<std::string> recent() {
  const std::lock_guard<std::mutex> lock(guard);
  return {lines().begin(), lines().end()};
}

std::string reason() {
  const std::lock_guard<std::mutex> lock(guard);
  return cause() + (place().empty() ? "" : "; " + place());
}

}  // namespace etfarm::log
