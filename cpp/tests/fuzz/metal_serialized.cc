// Feeds damaged Metal modules to the parser: each must be refused with a ValueError or read
// rightly. tests/test_metal_fuzz.py builds it with sanitizers; a crash, a read out of bounds, a
// leak or a large allocation ends it with an error. Each file named on the command line is a good
// module to start from.
#include <tvm/ffi/error.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "metal/serialized.h"

namespace {

using mlx_tvm_ffi::KernelSources;

// The module is copied into memory of exactly its size, so that reading one byte too many shows.
bool Parses(std::string_view bytes) {
  const std::vector<char> exact(bytes.begin(), bytes.end());
  try {
    const KernelSources kernels = mlx_tvm_ffi::ParseSerialized({exact.data(), exact.size()});
    size_t total = 0;
    for (const auto& [name, kernel] : kernels) {
      total += name.size() + kernel.payload.size();
      if (name.empty() || kernel.payload.empty() || kernel.info.num_buffers > 31) std::abort();
    }
    if (total > bytes.size()) std::abort();
    return true;
  } catch (const tvm::ffi::Error& error) {
    if (error.kind() != "ValueError") {
      std::fprintf(stderr, "unexpected %s\n", error.what());
      std::abort();
    }
    return false;
  }
}

void Put(std::string& bytes, size_t at, uint64_t value) {
  for (size_t i = 0; i < 8; ++i) bytes[at + i] = static_cast<char>(value >> (8 * i));
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> seeds;
  for (int i = 1; i < argc; ++i) {
    std::ifstream file(argv[i], std::ios::binary);
    seeds.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    if (!Parses(seeds.back())) {
      std::fprintf(stderr, "%s: not a good module to start from\n", argv[i]);
      return 1;
    }
  }
  if (seeds.empty()) {
    std::fprintf(stderr, "usage: %s module...\n", argv[0]);
    return 1;
  }
  size_t tried = 0;
  size_t read = 0;
  auto attempt = [&](std::string_view bytes) {
    ++tried;
    const bool parses = Parses(bytes);
    read += parses;
    return parses;
  };
  for (const std::string& seed : seeds) {
    for (size_t size = 0; size < seed.size(); ++size) {  // cut at every length
      if (attempt(std::string_view(seed).substr(0, size))) std::abort();
    }
    for (size_t at = 0; at + 8 <= seed.size();
         ++at) {  // every length field, and what looks like none
      for (const uint64_t value :
           {uint64_t{0}, uint64_t{1} << 31U, uint64_t{1} << 63U, ~uint64_t{0}}) {
        std::string bytes = seed;
        Put(bytes, at, value);
        attempt(bytes);
      }
    }
    for (size_t at = 0; at < seed.size(); ++at) {  // argument types and tags of another kind
      for (const char kind : {'\0', '\1', '\2', '\3', '\x7f', '\xff'}) {
        std::string bytes = seed;
        bytes[at] = kind;
        attempt(bytes);
      }
    }
  }
  std::mt19937_64 random(20240229);
  for (int round = 0; round < 100000; ++round) {
    std::string bytes = seeds[random() % seeds.size()];
    for (uint64_t edits = 1 + random() % 4; edits > 0; --edits) {
      const size_t at = random() % bytes.size();
      switch (random() % 4) {
        case 0:
          bytes[at] = static_cast<char>(random());
          break;
        case 1:
          bytes.erase(at, 1 + random() % 16);
          break;
        case 2:
          bytes.insert(at, bytes.substr(random() % bytes.size(), random() % 16));
          break;
        default:
          if (at + 8 <= bytes.size()) Put(bytes, at, random() >> (random() % 64));
      }
      if (bytes.empty()) bytes = "x";
    }
    attempt(bytes);
  }
  std::printf("%zu modules tried, %zu still readable\n", tried, read);
  return 0;
}
