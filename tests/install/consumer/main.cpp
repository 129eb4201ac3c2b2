// One query, two keys with equal scores: the output is the mean of their values, 1 and 4.
#include <cstddef>
#include <iostream>
#include <tessera/tessera.hpp>
#include <vector>

int main() {
  const float q[] = {1, 2}, k[] = {3, 4, 3, 4}, v[] = {1, 4};
  float o[] = {0};
  tessera::Problem problem;
  problem.q = tessera::layout(tessera::float32, {1, 1, 1, 2});
  problem.k = tessera::layout(tessera::float32, {1, 2, 1, 2});
  problem.v = tessera::layout(tessera::float32, {1, 2, 1, 1});
  problem.o = tessera::layout(tessera::float32, {1, 1, 1, 1});
  const tessera::Plan plan = tessera::plan(problem);
  std::vector<std::byte> workspace(tessera::workspace_bytes(plan));
  tessera::forward(plan, {.q = q, .k = k, .v = v, .o = o}, workspace);
  std::cout << "tessera " << tessera::version() << ": " << o[0] << "\n";
}
