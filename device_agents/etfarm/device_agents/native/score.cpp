#include "score.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>

#include "passes.h"

namespace etfarm {
namespace {

// Returns the natural logarithm of a token's probability, where `largest` is the largest logit.
float log_probability(const std::vector<float>& logits, float largest, std::int64_t token) {
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - largest);
  return static_cast<float>(static_cast<double>(logits[static_cast<std::size_t>(token)]) - largest - std::log(sum));
}

// Returns the index of the largest logit, the lowest of equal ones.
std::size_t check(const std::vector<float>& logits, const std::string& method, std::size_t index) {
  std::size_t best = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i]) || (std::isinf(logits[i]) && logits[i] > 0)) {
      const std::string after = "method '" + method + "' returned logits with NaN or infinity after token " + std::to_string(index);
      throw Failure{"RUNTIME", after, "", {}};
    }
    if (logits[i] > logits[best]) best = i;
  }
  if (std::isinf(logits[best])) throw Failure{"RUNTIME", "method '" + method + "' returned only logits of -inf", "", {}};
  return best;
}

}  // namespace

void score(Session& session, const Score& plan, Json result) {
  for (const auto* name : {&plan.prefill, &plan.decode}) {
    if (session.loaded(*name).tracer()) throw Failure{"BAD_STATE", "method '" + *name + "' is loaded with a tracer, which costs time", "", {}};
  }
  std::optional<LanguageModel> model;
  model.emplace(session, plan);
  std::vector<float> logits;
  std::vector<float> probabilities;
  std::vector<std::int32_t> best;
  std::vector<float> rows;
  auto row = plan.rows.begin();
  const auto count = plan.tokens.size();
  const auto window = static_cast<std::size_t>(plan.window);
  const std::int64_t start = now_ns();
  std::int64_t reported = start;
  report_progress("SCORE", 0, 0);
  for (std::size_t i = 0; i < count && (i == 0 || now_ns() - start < plan.max_time_ns); ++i) {
    if (i % window == 0 && plan.reload && model->has_run()) {
      model.reset();
      session.load_method(plan.prefill, false, false, false);
      if (plan.decode != plan.prefill) session.load_method(plan.decode, false, false, true);
      model.emplace(session, plan);
    }
    model->step(plan.tokens[i], static_cast<std::int64_t>(i % window));
    model->last_logits(logits);
    if (!rows.empty() && rows.size() % logits.size() != 0) {
      throw Failure{"RUNTIME", "method '" + plan.decode + "' changed its number of logits", "", {}};
    }
    const std::size_t largest = check(logits, plan.decode, i);
    best.push_back(static_cast<std::int32_t>(largest));
    float probability = 0;
    if (i + 1 < count && (i + 1) % window != 0) {
      const std::int64_t next = plan.tokens[i + 1];
      if (next >= static_cast<std::int64_t>(logits.size())) {
        throw Failure{"INPUT_MISMATCH", "token " + std::to_string(i + 1) + " is " + std::to_string(next) + ", but method '" + plan.decode +
                                            "' returns " + std::to_string(logits.size()) + " logits", "", {}};
      }
      probability = log_probability(logits, logits[largest], next);
    }
    probabilities.push_back(probability);
    if (row != plan.rows.end() && *row == static_cast<std::int64_t>(i)) {
      rows.insert(rows.end(), logits.begin(), logits.end());
      ++row;
    }
    if (const std::int64_t now = now_ns(); now - reported >= kProgressNs) {
      report_progress("SCORE", static_cast<std::int64_t>(i) + 1, now - start);
      reported = now;
    }
  }
  const std::int64_t elapsed = now_ns() - start;

  Bytes payload;
  const auto add = [&payload](const void* data, std::size_t bytes) {
    const auto* begin = static_cast<const std::uint8_t*>(data);
    payload.insert(payload.end(), begin, begin + bytes);
  };
  add(probabilities.data(), probabilities.size() * sizeof(float));
  add(best.data(), best.size() * sizeof(std::int32_t));
  add(rows.data(), rows.size() * sizeof(float));
  result.number("tokens", static_cast<std::int64_t>(best.size()))
      .number("rows", row - plan.rows.begin())
      .number("vocabulary", model->vocabulary())
      .number("duration_ns", elapsed)
      .number("payload_bytes", static_cast<std::int64_t>(payload.size()));
  Channel::get().send(result, payload.data(), payload.size());
}

}  // namespace etfarm
