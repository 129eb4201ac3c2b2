#include "cuda/runtime/sources.hpp"

#include <string>
#include <vector>

namespace tessera::cuda {
namespace {

// The embedded headers that a text includes, by their numbers in kKernelHeaders.
std::vector<int> included_by(std::string_view text) {
  constexpr std::string_view kInclude = "#include \"";
  std::vector<int> numbers;
  for (size_t at = text.find(kInclude); at != std::string_view::npos; at = text.find(kInclude, at)) {
    at += kInclude.size();
    const std::string_view name = text.substr(at, text.find('"', at) - at);
    for (int i = 0; i < kNumKernelHeaders; ++i) {
      if (name == kKernelHeaders[i].name) numbers.push_back(i);
    }
  }
  return numbers;
}

struct Header {
  Digest digest;
  std::vector<int> includes;
};

// Over 100 KiB of text, which is read once.
const std::vector<Header>& headers() {
  static const std::vector<Header>& all = *[] {
    auto* const read = new std::vector<Header>;
    for (int i = 0; i < kNumKernelHeaders; ++i) {
      Hasher hasher;
      hasher.text(kKernelHeaders[i].name);
      hasher.text(kKernelHeaders[i].text);
      read->push_back({hasher.digest(), included_by(kKernelHeaders[i].text)});
    }
    return read;
  }();
  return all;
}

}  // namespace

Digest headers_digest(std::string_view source) {
  std::vector<bool> reached(headers().size());
  std::vector<int> to_visit = included_by(source);
  while (!to_visit.empty()) {
    const auto number = static_cast<size_t>(to_visit.back());
    to_visit.pop_back();
    if (reached[number]) continue;
    reached[number] = true;
    const std::vector<int>& further = headers()[number].includes;
    to_visit.insert(to_visit.end(), further.begin(), further.end());
  }
  Hasher hasher;
  for (size_t i = 0; i < reached.size(); ++i) {
    if (reached[i]) hasher.text(headers()[i].digest.hex());
  }
  return hasher.digest();
}

}  // namespace tessera::cuda
