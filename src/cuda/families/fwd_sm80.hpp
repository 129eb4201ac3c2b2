// The interface of fwd_sm80 that other families use for their stand-ins and for parts of a mixed batch.
#pragma once

#include "tessera/tessera.h"

namespace tessera::cuda {

// Appends a step of fwd_sm80 to a plan of a problem that it supports. kNone: the keys are not split.
enum class Splits { kByLoad, kNone };
void add_fwd_sm80(tessera_plan& plan, Splits splits);
// For Alignment::add_stand_in. Its keys are not split, so that it needs no workspace.
void add_fwd_sm80_stand_in(tessera_plan& plan);

}  // namespace tessera::cuda
