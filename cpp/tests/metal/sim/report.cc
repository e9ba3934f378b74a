#include "report.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>

namespace metal_sim {
namespace {

constexpr size_t kMaxLogLines = 100000;

struct Report {
  std::mutex mutex;
  std::vector<std::string> errors, log;
};

Report& GetReport() {
  static auto* report = new Report;
  return *report;
}

std::string Format(const char* format, va_list arguments) {
  char text[512];
  vsnprintf(text, sizeof text, format, arguments);
  return text;
}

int64_t Number(const char* name, int64_t otherwise) {
  const char* value = getenv(name);
  return value ? atoll(value) : otherwise;
}

Order OrderOf(const char* name) {
  const char* value = getenv(name);
  return value ? ParseOrder(value) : Order::kEncoded;
}

}  // namespace

Counters& GetCounters() {
  static auto* counters = new Counters;
  return *counters;
}

Settings& GetSettings() {
  static auto* settings =
      new Settings{OrderOf("METAL_SIM_ORDER"),       OrderOf("METAL_SIM_ENCODER_ORDER"),
                   Number("METAL_SIM_RACES", 1) > 0, Number("METAL_SIM_DELAY_US", 0),
                   Number("METAL_SIM_SEED", 1),      0};
  return *settings;
}

Order ParseOrder(const std::string& name) {
  if (name == "reverse") return Order::kReverse;
  if (name == "random") return Order::kRandom;
  return Order::kEncoded;
}

void Log(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string text = Format(format, arguments);
  va_end(arguments);
  Report& report = GetReport();
  std::lock_guard lock(report.mutex);
  if (report.log.size() < kMaxLogLines) report.log.push_back(std::move(text));
}

void Fault(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string text = Format(format, arguments);
  va_end(arguments);
  static const bool echo = getenv("METAL_SIM_ECHO") != nullptr;
  Report& report = GetReport();
  std::lock_guard lock(report.mutex);
  if (std::find(report.errors.begin(), report.errors.end(), text) != report.errors.end()) return;
  if (echo) fprintf(stderr, "metal_sim: %s\n", text.c_str());
  report.errors.push_back(std::move(text));
}

std::vector<std::string> TakeErrors() {
  std::lock_guard lock(GetReport().mutex);
  return std::exchange(GetReport().errors, {});
}

std::vector<std::string> TakeLog() {
  std::lock_guard lock(GetReport().mutex);
  return std::exchange(GetReport().log, {});
}

std::map<std::string, long> Counts() {
  std::map<std::string, long> counts;
  GetCounters().ForEach([&](const char* name, std::atomic<long>& count) { counts[name] = count; });
  return counts;
}

void ResetCounts() {
  GetCounters().ForEach([](const char*, std::atomic<long>& count) { count = 0; });
  ResetMessages();
}

}  // namespace metal_sim
