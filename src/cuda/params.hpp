// Converts a checked plan and device pointers to kernel params.
#pragma once

#include "core/buffers.hpp"
#include "core/geometry.hpp"
#include "cuda/registry.hpp"
#include "tessera/config.hpp"
#include "tessera/tessera.h"

namespace tessera::cuda {

using core::divide_up;
inline constexpr int64_t kWorkspaceAlignment = 64;  // of each part of the workspace, in bytes
constexpr int64_t padded_to(int64_t a, int64_t b) { return divide_up(a, b) * b; }

RowTensor row_tensor(const tessera_layout& layout, const void* data);
StatTensor stat_tensor(const tessera_layout& layout, const void* data);
ScoreTensor score_tensor(const tessera_layout& layout, const void* data);
// Of k and v in pages: in_pages.
ScaleTensor scale_tensor(const tessera_layout& layout, const float* data, bool in_pages);

// True if every row starts at a multiple of 16 bytes.
bool rows_aligned(const tessera_layout& layout, const void* data);
// An error unless the address is a multiple of 16 bytes, in a call with `codes`, for which there is no other kernel.
tessera_status check_address_beside_codes(const char* name, const void* data, int32_t codes);
// As elements of 16 bits: two neighbours of a row, an even number of columns, are one.
tessera_layout codes_in_pairs(tessera_layout layout);

// The number of queries of the whole batch.
int64_t rows_total(const tessera_plan& plan);

// The options of a score that a kernel is compiled for.
ScoreConfig score_config(const tessera_plan& plan);
// The same for a kernel that reads a block mask as lists instead of testing each score.
ScoreConfig score_config_beside_block_mask(const tessera_plan& plan);

// In a family's `supports`: tensors with an entry for each score, or for each block of scores.
#define TESSERA_TENSOR(Class, flag, tensor, ...) (k##Class##Facts.entries ? tensors({#tensor}) : 0) |
inline constexpr uint64_t kScoreTensors =
    TESSERA_SCORE_OPTIONS(TESSERA_NO_OPTION, TESSERA_TENSOR, TESSERA_NO_OPTION) uint64_t{0};
#undef TESSERA_TENSOR

PositionMasks position_masks(const tessera_problem& problem, const tessera_buffers& buffers);

void fill_problem_params(ProblemParams& p, const tessera_plan& plan, const tessera_buffers& buffers);

// A merge of partial results, by tessera_combine or after the launches of a call.
CombineConfig combine_config(const tessera_combine_call& t);
CombineParams combine_params(const tessera_combine_call& t);

// The number of tiles of `block` rows: per sequence or, packed, padded tile indices of the batch
// (attention/sequence.cuh). `rows_a_query` heads are packed into the rows of a query.
int64_t tiles_of(bool packed, int64_t batch, int64_t rows, int64_t rows_a_query, int64_t block);

}  // namespace tessera::cuda
