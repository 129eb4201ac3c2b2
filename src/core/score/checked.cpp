#include "core/score/checked.hpp"

#include <algorithm>
#include <cinttypes>
#include <list>
#include <mutex>
#include <utility>
#include <vector>

#include "core/score/builder.hpp"
#include "core/score/operations.hpp"
#include "core/score/parse.hpp"
#include "core/score/print.hpp"
#include "core/status.hpp"

namespace tessera::core::score {
namespace {

// FNV-1a, which is equal on all machines.
uint64_t hash_of(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash == 0 ? 1 : hash;
}

// Renumbers the names of `program` to their indices in `names`, which contains all of them.
void number_by(const std::vector<Name>& names, Op op, std::vector<Name>& own, Program& program) {
  std::vector<int16_t> place;
  for (const Name& name : own) {
    const auto found = std::ranges::find(names, name.text, &Name::text);
    place.push_back(static_cast<int16_t>(found - names.begin()));
  }
  for (Value& value : program.values) {
    if (value.op == op) value.name = place[static_cast<size_t>(value.name)];
  }
  own = names;
}

Gradient gradient_by_names_of(const Program& program) {
  Gradient result = gradient(program);
  for (LoadGradient& load : result.loads) {
    const std::string& name = result.program.tensors[static_cast<size_t>(load.tensor)].text;
    load.tensor = static_cast<int>(std::ranges::find(program.tensors, name, &Name::text) - program.tensors.begin());
  }
  number_by(program.tensors, Op::kLoad, result.program.tensors, result.program);
  number_by(program.scalars, Op::kScalar, result.program.scalars, result.program);
  return result;
}

std::shared_ptr<const Checked> checked_of(const Program& program, std::string text) {
  std::shared_ptr<const Checked> mask_alone;
  if (program.mask >= 0 && program.score >= 0) {
    int mask = program.mask;
    Program alone = reachable(program, {&mask});
    alone.mask = mask;
    mask_alone = checked_of(alone, key(alone));
  }
  const uint64_t hash = hash_of(text);
  return std::make_shared<const Checked>(
      Checked{program, gradient_by_names_of(program), std::move(text), hash, std::move(mask_alone)});
}

// A cache of recent programs, so that neither a planned call nor an equal text is parsed again.
class Recent {
 public:
  std::shared_ptr<const Checked> find(std::string_view text) {
    const std::lock_guard lock(mutex_);
    const auto found = std::ranges::find_if(all_, [&](const auto& checked) { return checked->text == text; });
    if (found == all_.end()) return nullptr;
    all_.splice(all_.begin(), all_, found);
    return *found;
  }
  void add(const std::shared_ptr<const Checked>& checked) {
    const std::lock_guard lock(mutex_);
    all_.push_front(checked);
    if (all_.size() > kMost) all_.pop_back();
  }

 private:
  static constexpr size_t kMost = 64;
  std::mutex mutex_;
  std::list<std::shared_ptr<const Checked>> all_;  // the most recently used first
};

Recent& recent() {
  static Recent& programs = *new Recent;  // never destroyed, as threads may outlive main()
  return programs;
}

// Removes the next line from `text` and returns it.
std::string_view next_line(std::string_view& text) {
  const size_t end = std::min(text.find('\n'), text.size());
  const std::string_view line = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  return line;
}

// "bias:float2", a tensor; "c:float", a scalar.
bool read_name(std::string_view line, Name& name) {
  const size_t colon = line.find(':');
  if (colon == std::string_view::npos) return false;
  name.text = line.substr(0, colon);
  std::string_view type = line.substr(colon + 1);
  name.is_tensor = !type.empty() && type.back() >= '0' && type.back() <= '9';
  if (name.is_tensor) name.rank = type.back() - '0', type.remove_suffix(1);
  for (const Type known : {Type::kFloat, Type::kInt, Type::kBool}) {
    name.type = known;
    if (type == kTypeNames[static_cast<int>(known)]) return true;
  }
  return false;
}

}  // namespace

tessera_status check(const Program& program, std::shared_ptr<const Checked>& result) {
  std::string text = key(program);
  constexpr size_t kMostText = sizeof(tessera_plan_program::text) - 1;
  if (text.size() > kMostText) {
    return invalid("score program: %zu bytes in its canonical form, accepted at most %zu; constants may be scalars",
                   text.size(), kMostText);
  }
  std::shared_ptr<const Checked> known = recent().find(text);
  if (!known) {
    known = checked_of(program, std::move(text));
    recent().add(known);
  }
  result = std::move(known);
  return ok();
}

tessera_status read(std::string_view text, std::shared_ptr<const Checked>& result) {
  if (std::shared_ptr<const Checked> known = recent().find(text)) {
    result = std::move(known);
    return ok();
  }
  std::string_view rest = text;
  next_line(rest);  // the version, which check() compares together with the rest
  const std::string_view score = next_line(rest), mask = next_line(rest);
  std::vector<Name> names;
  while (!rest.empty()) {
    if (!read_name(next_line(rest), names.emplace_back())) return internal("score program: no name is written so");
  }
  Program program;
  TESSERA_RETURN_IF_ERROR(parse(score, mask, names, program));
  if (key(program) != text) return internal("score program: its canonical text reads back as another program");
  return check(program, result);
}

std::string gradient_text(const Checked& checked) {
  const Gradient& gradient = checked.gradient;
  const Program& program = gradient.program;
  std::vector<int> roots;
  if (gradient.d_s >= 0) roots.push_back(gradient.d_s);
  for (const LoadGradient& load : gradient.loads) {
    roots.insert(roots.end(), load.indices.begin(), load.indices.end());
    roots.push_back(load.adjoint);
  }
  if (roots.empty()) return "d_s = 0.0\n";
  const Texts texts = to_texts(program, roots);
  auto value = texts.values.begin();
  std::string text = texts.statements;
  for (size_t at = text.find("; "); at != std::string::npos; at = text.find("; ", at)) text.replace(at, 2, "\n");
  text += "d_s = " + (gradient.d_s < 0 ? "0.0" : *value++) + "\n";
  for (const LoadGradient& load : gradient.loads) {
    text += "d_" + program.tensors[static_cast<size_t>(load.tensor)].text + "[";
    for (size_t n = 0; n < load.indices.size(); ++n) text += (n ? ", " : "") + *value++;
    text += "] += " + *value++ + "\n";
  }
  return text;
}

}  // namespace tessera::core::score
