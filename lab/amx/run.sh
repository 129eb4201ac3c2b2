#!/bin/bash
# lab/amx/run.sh OUT [LIBRARY ...]: everything below, on a machine with AMX that does nothing else; one core at a time. Some three
# minutes. LIBRARY: folders that hold builds of libtessera.so.0.1, the first is linked with.
set -eu
out=$(realpath "$1"); shift
root=$(realpath "$(dirname "$0")/../.."); here=$root/lab/amx; mkdir -p "$out"; cd "$out"
kernel_flags="-O3 -std=c++20 -ffp-contract=fast -fno-math-errno -fno-trapping-math -w -I$root/src -I$root/include -mavx2 -mfma -mf16c -mprfchw
  -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mavx512vbmi -mavx512vbmi2 -mprefer-vector-width=512 -DTESSERA_COMPILE_AMX_BF16=1"
g++ $kernel_flags -DPROBE=real -c "$here/inner_loop_kernels.cpp" -o real.o
g++ $kernel_flags -DPROBE=emulated -DTESSERA_AMX_EMULATED=1 -c "$here/inner_loop_kernels.cpp" -o emulated.o
g++ -O2 -std=c++20 -mavx512f "$here/inner_loop.cpp" real.o emulated.o -o inner_loop
g++ -O2 -std=c++20 -w -mavx512f -mavx512bw -mavx512vl "$here/products.cpp" -o products
./inner_loop emulated | tee emulated.txt
if ! grep -q amx_bf16 /proc/cpuinfo; then echo "no AMX here"; exit; fi
./products | tee products.txt
for round in 1 2; do ./inner_loop real | tee "inner_loop_$round.txt"; done
[ $# -gt 0 ] || exit 0
g++ -O2 -std=c++20 -mavx512f -I"$root" -I"$root/include" "$here/stages.cpp" "$1/libtessera.so.0.1" -o stages
cells=fwd:64:512:0,fwd:64:512:1,fwd:64:2048:0,fwd:64:2048:1,fwd:64:8192:0,fwd:64:8192:1
for library in "$@" "$@"; do
  LD_LIBRARY_PATH=$library ./stages "stages_$(basename "$library").csv" 0.3 "$cells,${cells//:64:/:128:}" "main main+huge"
done
