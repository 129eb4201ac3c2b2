// Tessera: exact, IO-aware attention. The C++20 interface: a thin layer over the C one (tessera.h), header only.
//
//   tessera::Problem problem;
//   problem.q = problem.o = tessera::layout(tessera::bfloat16, {B, Sq, Hq, D});
//   problem.k = problem.v = tessera::layout(tessera::bfloat16, {B, Sk, Hkv, D});
//   problem.causal = true;
//   tessera::Plan plan = tessera::plan(problem);
//   std::vector<std::byte> workspace(plan.workspace_bytes);
//   tessera::forward(plan, {.q = q, .k = k, .v = v, .o = o}, workspace);
//
// Functions named try_... return a Status; all others throw Error.
#pragma once

#include "tessera/attention.hpp"
#include "tessera/plan.hpp"
#include "tessera/problem.hpp"
#include "tessera/program.hpp"
#include "tessera/status.hpp"
#include "tessera/tensor.hpp"
