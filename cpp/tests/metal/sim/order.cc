#include "order.h"

#include <algorithm>
#include <map>
#include <unordered_map>

#include "report.h"

namespace metal_sim {
namespace {

auto& Accesses() {
  static auto* accesses = new std::unordered_map<const Buffer*, std::vector<Access>>;
  return *accesses;
}

bool Ordered(const Access& first, const Access& second) {
  if (first.encoder == second.encoder) {
    return !first.concurrent || first.epoch != second.epoch || first.command == second.command;
  }
  return Before(second.encoder).Has(first.encoder) || Before(first.encoder).Has(second.encoder);
}

}  // namespace

void EncoderSet::Add(int encoder) {
  auto index = static_cast<size_t>(encoder);
  if (members_.size() <= index) members_.resize(index + 1);
  members_[index] = true;
}

void EncoderSet::Add(const EncoderSet& others) {
  if (members_.size() < others.members_.size()) members_.resize(others.members_.size());
  for (size_t i = 0; i < others.members_.size(); i++) {
    if (others.members_[i]) members_[i] = true;
  }
}

bool EncoderSet::Has(int encoder) const {
  auto index = static_cast<size_t>(encoder);
  return index < members_.size() && members_[index];
}

std::recursive_mutex& OrderMutex() {
  static auto* mutex = new std::recursive_mutex;
  return *mutex;
}

EncoderSet& SeenByHost() {
  static auto* seen = new EncoderSet;
  return *seen;
}

EncoderSet& Before(int encoder) {
  static auto* before = new std::map<int, EncoderSet>;
  return (*before)[encoder];
}

void NoteAccess(const Buffer* buffer, Access access) {
  std::lock_guard lock(OrderMutex());
  auto& earlier = Accesses()[buffer];
  for (const Access& other : earlier) {
    bool conflict = other.write || access.write;
    bool overlap = other.begin < access.end && access.begin < other.end;
    if (!conflict || !overlap || Ordered(other, access)) continue;
    GetCounters().races++;
    const char* kind = other.write && access.write ? "write/write" : "read/write";
    const char* where = other.encoder == access.encoder ? "in one encoder" : "across encoders";
    Fault("race (%s, %s): %s and %s share a buffer with nothing between", where, kind,
          other.kernel.c_str(), access.kernel.c_str());
  }
  earlier.push_back(std::move(access));
}

void ForgetAccesses(const Buffer* buffer) {
  std::lock_guard lock(OrderMutex());
  Accesses().erase(buffer);
}

}  // namespace metal_sim
