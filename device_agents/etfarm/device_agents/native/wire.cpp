#include "wire.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

namespace etfarm {
namespace {

constexpr std::size_t kMaxLineBytes = 1 << 20;

// Length of the valid UTF-8 sequence at `text`; 0 if there is none.
std::size_t utf8_length(std::string_view text) {
  const auto first = static_cast<unsigned char>(text[0]);
  const std::size_t length = first < 0x80 ? 1 : first >= 0xC2 && first <= 0xDF ? 2 : first >= 0xE0 && first <= 0xEF ? 3 : first >= 0xF0 && first <= 0xF4 ? 4 : 0;
  if (length == 0 || text.size() < length) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((static_cast<unsigned char>(text[i]) & 0xC0) != 0x80) return 0;
  }
  if (length >= 3) {
    const auto second = static_cast<unsigned char>(text[1]);
    // Overlong forms, surrogates and values above U+10FFFF are invalid, and strict decoders reject the whole line.
    if ((first == 0xE0 && second < 0xA0) || (first == 0xED && second > 0x9F) || (first == 0xF0 && second < 0x90) ||
        (first == 0xF4 && second > 0x8F)) {
      return 0;
    }
  }
  return length;
}

// Names in a program are arbitrary bytes, so invalid UTF-8 becomes U+FFFD to keep the line parsable.
std::string quoted(std::string_view text) {
  std::string out = "\"";
  while (!text.empty()) {
    const auto c = static_cast<unsigned char>(text[0]);
    const std::size_t length = utf8_length(text);
    if (length == 0) {
      out += "\\ufffd";
      text.remove_prefix(1);
      continue;
    }
    if (c == '"' || c == '\\') {
      out += '\\';
      out += text[0];
    } else if (c < 0x20 || c == 0x7F) {
      char escaped[8];
      std::snprintf(escaped, sizeof(escaped), "\\u%04x", c);
      out += escaped;
    } else {
      out.append(text.substr(0, length));
    }
    text.remove_prefix(length);
  }
  return out + "\"";
}

int hex(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

std::string percent_decoded(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      out += text[i];
      continue;
    }
    const int high = i + 2 < text.size() ? hex(text[i + 1]) : -1;
    const int low = i + 2 < text.size() ? hex(text[i + 2]) : -1;
    if (high < 0 || low < 0) throw Failure{"BAD_COMMAND", "a % is not followed by two hex digits", "", {}};
    out += static_cast<char>(high * 16 + low);
    i += 2;
  }
  if (out.find('\0') != std::string::npos) throw Failure{"BAD_COMMAND", "a value holds a NUL byte", "", {}};
  return out;
}

void write_all(int fd, const char* data, std::size_t size) {
  while (size > 0) {
    const ssize_t written = ::write(fd, data, size);
    if (written < 0) {
      if (errno == EINTR) continue;
      std::_Exit(3);  // the other end is closed
    }
    data += written;
    size -= static_cast<std::size_t>(written);
  }
}

}  // namespace

void Json::key(std::string_view name) {
  if (!body_.empty()) body_ += ',';
  body_ += quoted(name);
  body_ += ':';
}

Json& Json::raw(std::string_view name, std::string_view json) {
  key(name);
  body_ += json;
  return *this;
}

Json& Json::text(std::string_view name, std::string_view value) { return raw(name, quoted(value)); }
Json& Json::number(std::string_view name, std::int64_t value) { return raw(name, std::to_string(value)); }
Json& Json::boolean(std::string_view name, bool value) { return raw(name, value ? "true" : "false"); }
Json& Json::null(std::string_view name) { return raw(name, "null"); }

Json& Json::number(std::string_view name, const std::optional<std::int64_t>& value) {
  return value ? number(name, *value) : null(name);
}

Json& Json::real(std::string_view name, double value) {
  if (!std::isfinite(value)) return null(name);
  char text[40];
  std::snprintf(text, sizeof(text), "%.17g", value);
  return raw(name, text);
}

Json& Json::texts(std::string_view name, const std::vector<std::string>& values) {
  std::string list = "[";
  for (const auto& value : values) {
    if (list.size() > 1) list += ',';
    list += quoted(value);
  }
  return raw(name, list + "]");
}

Json& Json::numbers(std::string_view name, const std::vector<std::int64_t>& values) {
  std::string list = "[";
  for (const auto value : values) {
    if (list.size() > 1) list += ',';
    list += std::to_string(value);
  }
  return raw(name, list + "]");
}

Json& Json::objects(std::string_view name, const std::vector<Json>& values) {
  std::string list = "[";
  for (const auto& value : values) {
    if (list.size() > 1) list += ',';
    list += value.str();
  }
  return raw(name, list + "]");
}

Json& Json::append(const Json& other) {
  if (!body_.empty() && !other.body_.empty()) body_ += ',';
  body_ += other.body_;
  return *this;
}

std::int64_t parse_integer(std::string_view text, std::string_view what, std::int64_t low, std::int64_t high) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < low || value > high) {
    throw Failure{"BAD_COMMAND",
                  std::string(what) + " must be an integer from " + std::to_string(low) + " to " + std::to_string(high) + ", not '" +
                      std::string(text.substr(0, 40)) + "'",
                  "", {}};
  }
  return value;
}

Command Command::parse(std::string_view line) {
  Command command;
  for (std::size_t at = 0; at < line.size();) {
    const std::size_t space = std::min(line.find(' ', at), line.size());
    const std::string_view word = line.substr(at, space - at);
    at = space + 1;
    if (word.empty()) continue;
    if (command.name_.empty()) {
      command.name_ = word;
      continue;
    }
    const std::size_t equals = word.find('=');
    if (equals == 0 || equals == std::string_view::npos) {
      throw Failure{"BAD_COMMAND", "'" + std::string(word.substr(0, 40)) + "' is not key=value", "", {}};
    }
    command.arguments_.emplace_back(word.substr(0, equals), percent_decoded(word.substr(equals + 1)));
  }
  return command;
}

std::vector<std::string> Command::take_all(std::string_view key) {
  std::vector<std::string> values;
  std::vector<std::pair<std::string, std::string>> rest;
  for (auto& argument : arguments_) {
    if (argument.first == key) {
      values.push_back(std::move(argument.second));
    } else {
      rest.push_back(std::move(argument));
    }
  }
  arguments_ = std::move(rest);
  return values;
}

std::optional<std::string> Command::take(std::string_view key) {
  auto values = take_all(key);
  if (values.empty()) return std::nullopt;
  if (values.size() > 1) throw Failure{"BAD_COMMAND", std::string(key) + " is given twice", "", {}};
  return std::move(values[0]);
}

std::string Command::require(std::string_view key) {
  auto value = take(key);
  if (!value) throw Failure{"BAD_COMMAND", name_ + " needs " + std::string(key) + "=", "", {}};
  return std::move(*value);
}

std::int64_t Command::integer(std::string_view key, std::int64_t low, std::int64_t high, std::optional<std::int64_t> otherwise) {
  const auto value = otherwise ? take(key) : std::optional<std::string>(require(key));
  return value ? parse_integer(*value, key, low, high) : *otherwise;
}

bool Command::flag(std::string_view key, bool otherwise) { return integer(key, 0, 1, otherwise ? 1 : 0) == 1; }

std::vector<std::int64_t> Command::integers(std::string_view key, std::int64_t low, std::int64_t high) {
  const std::string text = require(key);
  std::vector<std::int64_t> values;
  for (std::size_t at = 0; !text.empty() && at <= text.size();) {
    const std::size_t comma = std::min(text.find(',', at), text.size());
    values.push_back(parse_integer(std::string_view(text).substr(at, comma - at), key, low, high));
    at = comma + 1;
  }
  return values;
}

void Command::finish() const {
  if (!arguments_.empty()) throw Failure{"BAD_COMMAND", name_ + " has no option '" + arguments_[0].first.substr(0, 40) + "'", "", {}};
}

Channel& Channel::get() {
  // Never destroyed: a thread that outlives main may still log.
  static Channel* channel = new Channel();
  return *channel;
}

Channel::Channel() : buffer_(1 << 16) {
  in_ = ::fcntl(0, F_DUPFD_CLOEXEC, 10);
  out_ = ::fcntl(1, F_DUPFD_CLOEXEC, 10);
  const int nothing = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (in_ < 0 || out_ < 0 || ::dup2(2, 1) < 0 || (nothing >= 0 && ::dup2(nothing, 0) < 0)) {
    std::fprintf(stderr, "etfarm-runner: needs stdin, stdout and stderr: %s\n", std::strerror(errno));
    std::_Exit(2);
  }
  if (nothing > 2) ::close(nothing);
}

bool Channel::fill() {
  begin_ = end_ = 0;
  for (;;) {
    const ssize_t size = ::read(in_, buffer_.data(), buffer_.size());
    if (size < 0 && errno == EINTR) continue;
    if (size <= 0) return false;
    end_ = static_cast<std::size_t>(size);
    return true;
  }
}

std::optional<std::string> Channel::read_line() {
  std::string line;
  bool too_long = false;
  for (;;) {
    if (begin_ == end_ && !fill()) return std::nullopt;
    const char* start = buffer_.data() + begin_;
    const auto* newline = static_cast<const char*>(std::memchr(start, '\n', end_ - begin_));
    const std::size_t size = newline ? static_cast<std::size_t>(newline - start) : end_ - begin_;
    too_long = too_long || line.size() + size > kMaxLineBytes;
    if (!too_long) line.append(start, size);
    begin_ += size + (newline ? 1 : 0);
    if (!newline) continue;
    if (too_long) throw Failure{"BAD_COMMAND", "the line is longer than " + std::to_string(kMaxLineBytes) + " bytes", "", {}};
    return line;
  }
}

bool Channel::read_payload(Bytes& into, std::size_t size) {
  into.resize(size);
  for (std::size_t done = 0; done < size;) {
    if (begin_ == end_ && !fill()) return false;
    const std::size_t part = std::min(size - done, end_ - begin_);
    std::memcpy(into.data() + done, buffer_.data() + begin_, part);
    begin_ += part;
    done += part;
  }
  return true;
}

bool Channel::skip(std::size_t size) {
  while (size > 0) {
    if (begin_ == end_ && !fill()) return false;
    const std::size_t part = std::min(size, end_ - begin_);
    begin_ += part;
    size -= part;
  }
  return true;
}

bool Channel::has_input() const {
  pollfd input{in_, POLLIN, 0};
  return begin_ != end_ || ::poll(&input, 1, 0) > 0;
}

void Channel::send(const Json& event, const void* payload, std::size_t size) {
  const std::string line = event.str() + "\n";
  const std::lock_guard<std::mutex> lock(sending_);
  write_all(out_, line.data(), line.size());
  write_all(out_, static_cast<const char*>(payload), size);
}

}  // namespace etfarm
