// Score programs from text: the C interface's handles.
#include <algorithm>
#include <cinttypes>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/guarded.hpp"
#include "core/score/handle.hpp"
#include "core/score/parse.hpp"
#include "core/score/print.hpp"
#include "core/status.hpp"
#include "core/text.hpp"

namespace tessera::api {
namespace {

using core::score::Name;

tessera_status read_names(const tessera_program_name* given, int32_t count, std::vector<Name>& names) {
  if (count < 0) return invalid("num_names: %d, accepted 0 and more", count);
  if (!given && count > 0) return invalid("names: NULL, must point to %d names", count);
  for (int32_t n = 0; n < count; ++n) {
    const auto& [text, type, rank] = given[n];
    if (!text) return invalid("names[%d]: NULL, accepted a name", n);
    if (type < TESSERA_VALUE_FLOAT || type > TESSERA_VALUE_BOOL) {
      return invalid("names[%d] (%.40s): type %d, accepted 0 (float), 1 (int) and 2 (bool)", n, text, type);
    }
    if (rank < TESSERA_SCALAR_RANK || rank > core::score::kMaxRank) {
      return invalid("names[%d] (%.40s): rank %d, accepted -1 (a scalar) and 0 .. %d", n, text, rank,
                     core::score::kMaxRank);
    }
    const bool is_tensor = rank != TESSERA_SCALAR_RANK;
    names.push_back({text, static_cast<core::score::Type>(type), is_tensor ? rank : 0, is_tensor});
  }
  return ok();
}

tessera_status create(std::string_view score, std::string_view mask, const tessera_program_name* given, int32_t count,
                      tessera_program** result) {
  std::vector<Name> names;
  TESSERA_RETURN_IF_ERROR(read_names(given, count, names));
  auto program = std::make_unique<tessera_program>();
  for (const Name& name : names) (name.is_tensor ? program->tensors : program->scalars).push_back(name);
  if (program->tensors.size() > TESSERA_MAX_CAPTURED_TENSORS) {
    return invalid("names: %zu tensors, accepted at most %d", program->tensors.size(), TESSERA_MAX_CAPTURED_TENSORS);
  }
  if (program->scalars.size() > TESSERA_MAX_CAPTURED_SCALARS) {
    return invalid("names: %zu scalars, accepted at most %d", program->scalars.size(), TESSERA_MAX_CAPTURED_SCALARS);
  }
  core::score::Program parsed;
  TESSERA_RETURN_IF_ERROR(core::score::parse(score, mask, names, parsed));
  TESSERA_RETURN_IF_ERROR(core::score::check(parsed, program->checked));
  *result = program.release();
  return ok();
}

std::string text_of(const core::score::Checked& checked, int32_t which) {
  const auto value = [&](int root) { return root < 0 ? std::string() : core::score::to_text(checked.program, root); };
  switch (which) {
    case TESSERA_PROGRAM_SCORE:
      return value(checked.program.score);
    case TESSERA_PROGRAM_MASK:
      return value(checked.program.mask);
    case TESSERA_PROGRAM_GRADIENT:
      return gradient_text(checked);
    default:
      return "";
  }
}

}  // namespace
}  // namespace tessera::api

static_assert(TESSERA_MAX_CAPTURED_TENSORS == tessera::core::score::kMaxTensors &&
              TESSERA_MAX_CAPTURED_SCALARS == tessera::core::score::kMaxScalars);

extern "C" {

tessera_status tessera_program_create(const char* score, const char* mask, const tessera_program_name* names,
                                      int32_t num_names, tessera_program** program) {
  if (!program) return tessera::invalid("program: NULL, must point to a handle");
  return tessera::core::guarded("tessera_program_create", [&] {
    return tessera::api::create(score ? score : "", mask ? mask : "", names, num_names, program);
  });
}

void tessera_program_retain(tessera_program* program) {
  if (program) program->references.fetch_add(1, std::memory_order_relaxed);
}

void tessera_program_release(tessera_program* program) {
  if (program && program->references.fetch_sub(1, std::memory_order_acq_rel) == 1) delete program;
}

size_t tessera_program_describe(const tessera_program* program, int32_t which, char* text, size_t size) {
  if (!program) return 0;
  return tessera::core::copy_out(tessera::api::text_of(*program->checked, which), text, size);
}

uint64_t tessera_program_hash(const tessera_program* program) { return program ? program->checked->hash : 0; }

}  // extern "C"
