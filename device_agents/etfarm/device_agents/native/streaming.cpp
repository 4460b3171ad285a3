#include "streaming.h"

#include <algorithm>

namespace etfarm {
namespace {

constexpr std::int64_t kSendNs = 50'000'000;   // minimum time between two `tokens` events
constexpr std::size_t kMaxTokensOfEvent = 256;

// The tokens that were not sent yet.
class Outbox {
 public:
  explicit Outbox(std::int64_t prefill_ns) : prefill_ns_(prefill_ns) {}

  // Adds a token that was selected at `now`.
  void add(std::int64_t token, std::int64_t token_ns, std::int64_t now) {
    tokens_.push_back(token);
    times_.push_back(token_ns);
    // The first one is sent at once.
    if (now - sent_ < kSendNs && tokens_.size() < kMaxTokensOfEvent) return;
    send();
    sent_ = now;
  }

  void send() {
    if (tokens_.empty()) return;
    Json event;
    event.text("event", "tokens").numbers("tokens", tokens_).numbers("token_ns", times_).number("prefill_ns", prefill_ns_);
    Channel::get().send(event);
    prefill_ns_.reset();
    tokens_.clear();
    times_.clear();
  }

 private:
  std::vector<std::int64_t> tokens_;
  std::vector<std::int64_t> times_;
  std::optional<std::int64_t> prefill_ns_;  // sent with the first token
  std::int64_t sent_ = 0;
};

}  // namespace

void stream(Session& session, const Stream& plan, Json result) {
  for (const auto* name : {&plan.prefill, &plan.decode}) {
    if (session.loaded(*name).tracer()) throw Failure{"BAD_STATE", "method '" + *name + "' is loaded with a tracer, which costs time", "", {}};
  }
  LanguageModel model(session, plan);
  const auto end = static_cast<std::int64_t>(plan.context.size());
  const std::int64_t largest = std::min(plan.max_chunk, model.prefill().most());
  const std::int64_t start = now_ns();
  std::string reason;
  const auto is_over = [&](std::int64_t now) {
    if (Channel::get().has_input()) reason = "CANCELLED";
    else if (now - start >= plan.max_time_ns) reason = "MAX_TIME";
    return !reason.empty();
  };

  // `start` at first: what takes one execution gets at least one token.
  std::int64_t now = start;
  for (std::int64_t begin = plan.depth; begin < end && !is_over(now); now = now_ns()) {
    const std::int64_t count = std::min(largest, end - begin);
    // Tokens that are too few for prefill are executed one by one; the text may end between them.
    const std::int64_t next = begin + (count >= model.prefill().least() ? count : 1);
    model.process(plan.context, begin, next);
    begin = next;
  }
  std::int64_t done = 0;
  if (reason.empty()) {
    Outbox outbox(now - start);
    std::int64_t from = start;
    std::int64_t token = 0;
    try {
      for (;;) {
        token = model.next_token();
        now = now_ns();
        outbox.add(token, now - from, now);
        ++done;
        if (std::find(plan.stop_tokens.begin(), plan.stop_tokens.end(), token) != plan.stop_tokens.end()) reason = "STOP_TOKEN";
        else if (done == plan.tokens) reason = "LENGTH";
        if (!reason.empty() || is_over(now)) break;
        from = now_ns();
        model.step(token, end + done - 1);
      }
    } catch (...) {
      outbox.send();  // the reader must know which tokens are in the context
      throw;
    }
    outbox.send();
  }
  result.number("tokens", done).text("finish_reason", reason).number("duration_ns", now_ns() - start);
  Channel::get().send(result);
}

}  // namespace etfarm
