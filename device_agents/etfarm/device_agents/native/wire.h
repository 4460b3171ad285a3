// The two pipes of the runner: command lines and payloads in, JSON lines and payloads out, as specified in PROTOCOL.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace etfarm {

using Bytes = std::vector<std::uint8_t>;

// The reason why a command is answered with an `error` event. `code` is one of those in PROTOCOL.md.
struct Failure {
  std::string code;
  std::string message;
  std::string runtime_code;        // ExecuTorch's own error name, if there is one
  std::vector<std::string> names;  // the missing operators or backends
};

// One JSON object under construction; keys come in the order of the calls.
class Json {
 public:
  Json& text(std::string_view key, std::string_view value);
  Json& number(std::string_view key, std::int64_t value);
  Json& number(std::string_view key, const std::optional<std::int64_t>& value);  // null if absent
  Json& real(std::string_view key, double value);  // null if JSON cannot represent the number
  Json& boolean(std::string_view key, bool value);
  Json& null(std::string_view key);
  Json& raw(std::string_view key, std::string_view json);
  Json& texts(std::string_view key, const std::vector<std::string>& values);
  Json& numbers(std::string_view key, const std::vector<std::int64_t>& values);
  Json& objects(std::string_view key, const std::vector<Json>& values);
  Json& append(const Json& other);  // appends the keys of `other`
  std::string str() const { return "{" + body_ + "}"; }

 private:
  void key(std::string_view name);
  std::string body_;
};

// A line `command key=value ...` with its payload. Keys may repeat; every key must be taken before finish().
class Command {
 public:
  static Command parse(std::string_view line);

  const std::string& name() const { return name_; }
  std::optional<std::string> take(std::string_view key);
  std::string require(std::string_view key);
  std::vector<std::string> take_all(std::string_view key);
  std::int64_t integer(std::string_view key, std::int64_t low, std::int64_t high, std::optional<std::int64_t> otherwise = {});
  bool flag(std::string_view key, bool otherwise);
  std::vector<std::int64_t> integers(std::string_view key, std::int64_t low, std::int64_t high);
  void finish() const;  // refuses keys that were not taken: a misspelt option must not be ignored

  Bytes payload;

 private:
  std::string name_;
  std::vector<std::pair<std::string, std::string>> arguments_;
};

std::int64_t parse_integer(std::string_view text, std::string_view what, std::int64_t low, std::int64_t high);

// Owns the private copies of stdin and stdout. Sending is safe from every thread.
class Channel {
 public:
  // Moves the protocol off fds 0 and 1, which then lead to /dev/null and stderr, so that a library's output cannot corrupt it.
  static Channel& get();

  // Returns the next line without its newline; nothing at the end of the stream. Over-long lines are skipped with a Failure.
  std::optional<std::string> read_line();
  // Returns false if the stream ended first.
  bool read_payload(Bytes& into, std::size_t size);
  bool skip(std::size_t size);
  // Whether a further command has begun to arrive, or the stream has ended. Does not wait.
  bool has_input() const;

  void send(const Json& event) { send(event, nullptr, 0); }
  // `payload_bytes` in the event must equal `size`.
  void send(const Json& event, const void* payload, std::size_t size);

 private:
  Channel();
  bool fill();

  int in_ = -1;
  int out_ = -1;
  std::mutex sending_;
  std::vector<char> buffer_;
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
};

}  // namespace etfarm
