// etfarm-runner: loads one ExecuTorch program and runs it on command. PROTOCOL.md is its specification.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <new>
#include <set>

#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/kernel/operator_registry.h>
#include <sched.h>

#include "confine.h"
#include "generation.h"
#include "log.h"
#include "passes.h"
#include "score.h"
#include "self_test.h"
#include "session.h"
#include "streaming.h"
#include "system.h"
#include "threadpool.h"
#include "wire.h"

#ifndef ETFARM_EXECUTORCH_VERSION
#error "build.py defines ETFARM_EXECUTORCH_VERSION"
#endif
#if defined(__x86_64__)
#define ETFARM_ARCH "x86_64"
#elif defined(__aarch64__)
#define ETFARM_ARCH "aarch64"
#else
#error "etfarm runs on x86_64 and aarch64"
#endif

namespace etfarm {
namespace {

constexpr int kProtocol = 1;
// More than any tensor that fits into a phone's memory; a larger length means that the stream is damaged.
constexpr std::int64_t kMaxPayloadBytes = std::int64_t{1} << 33;
constexpr std::int64_t kMaxTimeNs = std::int64_t{1} << 60;
constexpr std::int64_t kMaxContextTokens = std::int64_t{1} << 22;
constexpr std::int64_t kMaxGeneratedTokens = 1 << 16;
constexpr std::int64_t kMaxRepetitions = 1000;
constexpr std::size_t kMaxRows = 1024;

// The restrictions that this process applied to itself at its start.
std::vector<std::string> confined;

Json result_of(const Command& command) { return Json().text("event", "result").text("command", command.name()); }

void send_values(Json result, const std::vector<Json>& headers, const Bytes& payload) {
  result.objects("values", headers).number("payload_bytes", static_cast<std::int64_t>(payload.size()));
  Channel::get().send(result, payload.data(), payload.size());
}

std::vector<std::string> command_names();

void hello(Session&, Command& command) {
  command.finish();
  std::set<std::string> operators;
  for (const auto& kernel : executorch::runtime::get_registered_kernels()) operators.insert(kernel.name_);
  std::set<std::string> backends;
  for (std::size_t i = 0; i < executorch::runtime::get_num_registered_backends(); ++i) {
    const auto name = executorch::runtime::get_backend_name(i);
    const auto* backend = name.ok() ? executorch::runtime::get_backend_class(*name) : nullptr;
    if (backend && backend->is_available()) backends.insert(*name);
  }
  Channel::get().send(result_of(command)
                          .number("protocol", kProtocol)
                          .text("executorch", ETFARM_EXECUTORCH_VERSION)
                          .text("arch", ETFARM_ARCH)
                          .texts("backends", {backends.begin(), backends.end()})
                          .texts("operators", {operators.begin(), operators.end()})
                          .texts("confined", confined)
                          .texts("commands", command_names()));
}

void self_test_command(Session&, Command& command) {
  command.finish();
  Channel::get().send(result_of(command).texts("passed", self_test()));
}

void threads(Session& session, Command& command) {
  const auto count = command.integer("n", 1, 1024);
  command.finish();
  if (session.loaded()) throw Failure{"BAD_STATE", "threads must be set before load: XNNPACK keeps the old pool and can hang", "", {}};
  auto* pool = executorch::extension::threadpool::get_threadpool();
  if (!pool && count != 1) throw Failure{"RUNTIME", "ExecuTorch has no thread pool here", "", {}};
  if (pool && pool->get_thread_count() != static_cast<std::size_t>(count)) pool->_unsafe_reset_threadpool(static_cast<std::uint32_t>(count));
  if (thread_count() != static_cast<std::size_t>(count)) {
    throw Failure{"RUNTIME", "the thread pool has " + std::to_string(thread_count()) + " threads where " + std::to_string(count) + " were asked for", "", {}};
  }
  // pthreadpool ignores a thread that could not be created, mostly for lack of memory for its stack.
  if (task_count().value_or(count) < count) {
    throw Failure{"OUT_OF_MEMORY", "there is no room for " + std::to_string(count) + " threads", "MemoryAllocationFailed", {}};
  }
  Channel::get().send(result_of(command).number("threads", count));
}

void affinity(Session&, Command& command) {
  const auto cores = command.integers("cores", 0, CPU_SETSIZE - 1);
  command.finish();
  if (cores.empty()) throw Failure{"BAD_COMMAND", "affinity needs at least one core", "", {}};
  if (const auto problem = bind_to_cores(cores)) throw Failure{"SYSTEM", "cannot bind to the cores " + shape_text(cores) + ": " + *problem, "", {}};
  Channel::get().send(result_of(command).numbers("cores", cores));
}

// Appends the fields returned by a Session method to the event's header.
void reply(const Command& command, const Json& body) {
  Channel::get().send(result_of(command).append(body));
}

void load(Session& session, Command& command) {
  const std::string path = command.require("path");
  const auto data = command.take_all("data");
  command.finish();
  reply(command, session.load(path, data));
}

void method(Session& session, Command& command) {
  const std::string name = command.require("name");
  command.finish();
  reply(command, session.describe(name));
}

void load_method(Session& session, Command& command) {
  const std::string name = command.require("name");
  const bool trace = command.flag("trace", false);
  const bool debug = command.flag("debug", false);
  const bool keep = command.flag("keep", false);
  command.finish();
  reply(command, session.load_method(name, trace, debug, keep));
}

void select(Session& session, Command& command) {
  const std::string name = command.require("name");
  command.finish();
  session.select(name);
  Channel::get().send(result_of(command));
}

void input(Session& session, Command& command) {
  session.set_input(command);
  Channel::get().send(result_of(command));
}

void default_inputs(Session& session, Command& command) {
  const auto seed = static_cast<std::uint64_t>(command.integer("seed", 0, INT64_MAX));
  command.finish();
  std::vector<Json> headers;
  Bytes payload;
  session.default_inputs(seed, headers, payload);
  send_values(result_of(command), headers, payload);
}

void run(Session& session, Command& command) {
  command.finish();
  LoadedMethod& method = session.ready();
  if (method.debugging()) throw Failure{"BAD_STATE", "a method loaded with debug=1 runs by the debug command only", "", {}};
  const auto took = method.execute(session.inputs()).ns();
  if (method.tracer()) method.tracer()->reset();
  Channel::get().send(result_of(command).number("run_ns", took));
}

void measure_command(Session& session, Command& command) {
  Plan plan{};
  plan.warmup = command.integer("warmup", 0, 1'000'000'000, 10);
  plan.iterations = command.integer("iterations", 1, 1'000'000'000, 100);
  plan.min_time_ns = command.integer("min_time_ns", 0, kMaxTimeNs, 1'000'000'000);
  plan.max_time_ns = command.integer("max_time_ns", 1, kMaxTimeNs, 60'000'000'000);
  plan.max_samples = command.integer("max_samples", 1, 100'000'000, 1'000'000);
  plan.steady = command.flag("steady", false);
  plan.max_warmup_ns = command.integer("max_warmup_ns", 1, kMaxTimeNs, plan.max_time_ns);
  command.finish();
  measure(session, plan, result_of(command));
}

// Reads the arguments that name a language model's methods and inputs.
void take_methods(Command& command, ModelMethods& methods) {
  methods.prefill = command.require("prefill");
  methods.decode = command.take("decode").value_or(methods.prefill);
  methods.token_input = static_cast<std::size_t>(command.integer("token_input", 0, 1 << 20, 0));
  methods.position_input = static_cast<std::size_t>(command.integer("position_input", 0, 1 << 20, 1));
  methods.max_chunk = command.integer("max_chunk", 1, kMaxContextTokens, kMaxContextTokens);
  methods.embedding = command.take("embedding").value_or("");
  methods.encoders = command.take_all("encoder");
  if (!methods.encoders.empty() && methods.embedding.empty()) throw Failure{"BAD_COMMAND", "encoder needs embedding", "", {}};
  const std::vector<std::string> names = methods.names();
  if (std::set<std::string>(names.begin(), names.end()).size() != names.size()) {
    throw Failure{"BAD_COMMAND", "a method can be only one of encoder, embedding and prefill or decode", "", {}};
  }
}

// Reads the payload: token ids as int32.
std::vector<std::int64_t> take_tokens(const Bytes& payload) {
  const std::size_t count = payload.size() / sizeof(std::int32_t);
  if (payload.size() % sizeof(std::int32_t) != 0 || count > static_cast<std::size_t>(kMaxContextTokens)) {
    throw Failure{"BAD_COMMAND", "the payload must be at most " + std::to_string(kMaxContextTokens) + " int32 tokens", "", {}};
  }
  std::vector<std::int64_t> tokens(count);
  for (std::size_t i = 0; i < count; ++i) {
    std::int32_t token = 0;
    std::memcpy(&token, payload.data() + i * sizeof(token), sizeof(token));
    if (token < 0) throw Failure{"BAD_COMMAND", "token " + std::to_string(i) + " is negative", "", {}};
    tokens[i] = token;
  }
  return tokens;
}

void generate_command(Session& session, Command& command) {
  Generation plan{};
  take_methods(command, plan);
  plan.depth = command.integer("depth", 0, kMaxContextTokens, 0);
  plan.tokens = command.integer("tokens", 1, kMaxGeneratedTokens);
  plan.warmup = command.integer("warmup", 0, kMaxRepetitions, 1);
  plan.repetitions = command.integer("repetitions", 1, kMaxRepetitions, 5);
  plan.max_time_ns = command.integer("max_time_ns", 1, kMaxTimeNs, 60'000'000'000);
  plan.reload = command.flag("reload", false);
  command.finish();
  plan.context = take_tokens(command.payload);
  if (plan.context.size() <= static_cast<std::size_t>(plan.depth)) {
    throw Failure{"BAD_COMMAND", "the payload must have more tokens than depth", "", {}};
  }
  generate(session, plan, result_of(command));
}

void score_command(Session& session, Command& command) {
  Score plan{};
  take_methods(command, plan);
  plan.window = command.integer("window", 1, kMaxContextTokens, kMaxContextTokens);
  plan.rows = command.integers("rows", 0, kMaxContextTokens);
  plan.max_time_ns = command.integer("max_time_ns", 1, kMaxTimeNs, 60'000'000'000);
  plan.reload = command.flag("reload", false);
  command.finish();
  plan.tokens = take_tokens(command.payload);
  if (plan.tokens.empty()) throw Failure{"BAD_COMMAND", "the payload must have at least one token", "", {}};
  const bool ascends = std::adjacent_find(plan.rows.begin(), plan.rows.end(), std::greater_equal<>()) == plan.rows.end();
  if (plan.rows.size() > kMaxRows) throw Failure{"BAD_COMMAND", "rows must be at most " + std::to_string(kMaxRows), "", {}};
  if (!ascends || (!plan.rows.empty() && plan.rows.back() >= static_cast<std::int64_t>(plan.tokens.size()))) {
    throw Failure{"BAD_COMMAND", "rows must be ascending indices of tokens", "", {}};
  }
  score(session, plan, result_of(command));
}

void stream_command(Session& session, Command& command) {
  Stream plan{};
  take_methods(command, plan);
  plan.depth = command.integer("depth", 0, kMaxContextTokens, 0);
  plan.tokens = command.integer("tokens", 1, kMaxGeneratedTokens);
  plan.max_time_ns = command.integer("max_time_ns", 1, kMaxTimeNs, 600'000'000'000);
  plan.stop_tokens = command.integers("stop_tokens", 0, INT32_MAX);
  command.finish();
  plan.context = take_tokens(command.payload);
  if (plan.context.size() <= static_cast<std::size_t>(plan.depth)) {
    throw Failure{"BAD_COMMAND", "the payload must have more tokens than depth", "", {}};
  }
  stream(session, plan, result_of(command));
}

// Nothing is left to stop: what was in progress has ended because this command was waiting.
void stop(Session&, Command& command) {
  command.finish();
  Channel::get().send(result_of(command));
}

void trace_command(Session& session, Command& command) {
  const auto iterations = command.integer("iterations", 1, 1'000'000);
  const auto warmup = command.integer("warmup", 0, 1'000'000, 1);
  const std::string path = command.require("path");
  command.finish();
  trace(session, warmup, iterations, path, result_of(command));
}

void debug_command(Session& session, Command& command) {
  const std::string path = command.require("path");
  const std::string dump = command.require("dump");
  const auto max_bytes = command.integer("max_bytes", 0, INT64_MAX, INT64_MAX);
  command.finish();
  Channel::get().send(debug(session, path, dump, static_cast<std::size_t>(max_bytes), result_of(command)));
}

void outputs(Session& session, Command& command) {
  command.finish();
  std::vector<Json> headers;
  Bytes payload;
  session.outputs(headers, payload);
  send_values(result_of(command), headers, payload);
}

void memory(Session&, Command& command) {
  command.finish();
  Channel::get().send(result_of(command)
                          .number("rss_bytes", status_bytes("VmRSS"))
                          .number("peak_rss_bytes", peak_rss_bytes())
                          .number("data_bytes", status_bytes("VmData")));
}

const std::map<std::string, std::function<void(Session&, Command&)>>& commands() {
  static const std::map<std::string, std::function<void(Session&, Command&)>> table = {
      {"hello", hello},       {"threads", threads}, {"affinity", affinity}, {"load", load},
      {"method", method},     {"input", input},     {"run", run},           {"load_method", load_method},
      {"outputs", outputs},   {"memory", memory},   {"trace", trace_command}, {"default_inputs", default_inputs},
      {"measure", measure_command}, {"debug", debug_command},
      {"self_test", self_test_command}, {"select", select},     {"generate", generate_command},
      {"score", score_command},
      {"stream", stream_command}, {"stop", stop},
  };
  return table;
}

std::vector<std::string> command_names() {
  std::vector<std::string> names;
  for (const auto& entry : commands()) names.push_back(entry.first);
  return names;
}

void send_error(const std::string& command, const Failure& failure) {
  Json event;
  event.text("event", "error").text("command", command).text("code", failure.code).text("message", failure.message);
  failure.runtime_code.empty() ? event.null("runtime_code") : event.text("runtime_code", failure.runtime_code);
  Channel::get().send(event.texts("names", failure.names).texts("log", log::recent()));
}

// Answers one line; returns false once the session is over.
bool serve(Session& session, const std::string& line) {
  log::begin_command();
  Command command;
  try {
    command = Command::parse(line);
    // Read the payload whatever the command is, so that it is not parsed as commands.
    if (const auto bytes = command.take("bytes")) {
      const auto size = static_cast<std::size_t>(parse_integer(*bytes, "bytes", 0, kMaxPayloadBytes));
      try {
        const auto& name = command.name();
        const bool is_taken = name == "input" || name == "generate" || name == "score" || name == "stream";
        if (is_taken ? !Channel::get().read_payload(command.payload, size) : !Channel::get().skip(size)) return false;
      } catch (const std::bad_alloc&) {
        Channel::get().skip(size);
        throw;
      }
    }
    if (command.name() == "quit") {
      command.finish();
      Channel::get().send(result_of(command));
      return false;
    }
    const auto entry = commands().find(command.name());
    if (entry == commands().end()) throw Failure{"BAD_COMMAND", "there is no command '" + command.name().substr(0, 40) + "'", "", {}};
    entry->second(session, command);
  } catch (const Failure& failure) {
    send_error(command.name(), failure);
  } catch (const std::bad_alloc&) {
    send_error(command.name(), {"OUT_OF_MEMORY", "an allocation failed", "MemoryAllocationFailed", {}});
  } catch (const std::exception& error) {
    send_error(command.name(), {"RUNTIME", std::string("uncaught exception: ") + error.what(), "Internal", {}});
  }
  return true;
}

int run_main(int argc, char** argv) {
  std::optional<std::int64_t> limit;
  bool confines = false;
  std::vector<std::string> readable;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    if (option == "--confine") {
      confines = true;
    } else if (option == "--readable" && i + 1 < argc) {
      readable.emplace_back(argv[++i]);
    } else if (option == "--limit-data-bytes" && i + 1 < argc && std::atoll(argv[i + 1]) > 0) {
      limit = std::atoll(argv[++i]);
    } else {
      std::fprintf(stderr, "usage: etfarm-runner [--confine [--readable PATH]...] [--limit-data-bytes N]\n");
      return 2;
    }
  }
  restrain(limit);
  Channel& channel = Channel::get();
  log::capture();
  if (confines) confined = confine(readable);
  Session session;
  for (;;) {
    try {
      const auto line = channel.read_line();
      if (!line || !serve(session, *line)) break;
    } catch (const Failure& failure) {
      send_error("", failure);
    }
  }
  // Skip the destructors of backends: they have nothing left to do, and some of them wait for threads.
  std::fflush(nullptr);
  std::_Exit(0);
}

}  // namespace
}  // namespace etfarm

int main(int argc, char** argv) { return etfarm::run_main(argc, argv); }
