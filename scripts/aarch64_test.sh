#!/usr/bin/env bash
# aarch64_test.sh subset | all: compiles the library and the kernels' tests for AArch64 by Debian's cross compiler, and
# runs them by qemu: every case of the table on each instruction set, or those of tests/op/sanitizer_cases.txt. Exits
# with 77 where one of the two is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
depth=${1:-}
if [[ $depth != subset && $depth != all ]]; then
  echo "aarch64_test.sh: '$depth', accepted subset and all" >&2
  exit 2
fi
for program in aarch64-linux-gnu-g++ qemu-aarch64; do
  if ! command -v $program > /dev/null; then
    echo "skipped: no $program here (Debian: g++-aarch64-linux-gnu, qemu-user)"
    exit 77
  fi
done

jobs=${JOBS:-$(nproc)}
cmake --preset aarch64 > /dev/null
cmake --build --preset aarch64 --parallel "$jobs" --target op_tests | tail -1
tests=(qemu-aarch64 -cpu max -L /usr/aarch64-linux-gnu build/aarch64/tests/op_tests)
if [[ $depth == subset ]]; then
  cases=build/aarch64/cases
  rm -rf $cases && mkdir $cases
  grep -v '^#' tests/op/sanitizer_cases.txt | split -n "r/$jobs" - $cases/
  ls $cases/* | xargs -P "$jobs" -I{} "${tests[@]}" --cases {} --backend cpu
  exit
fi
# What GPUs and AMX have is tested elsewhere.
seq 0 63 | xargs -P "$jobs" -I{} env GTEST_TOTAL_SHARDS=64 GTEST_SHARD_INDEX={} "${tests[@]}" --gtest_brief=1 \
  '--gtest_filter=-*Amx*:*Gpu*:*Cuda*'
