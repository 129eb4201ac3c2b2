#!/usr/bin/env bash
# The CUDA benchmarks on a machine with a GPU: builds the Python extension, then runs the named benchmarks. Writes
# bench.log and one JSON file per benchmark to $OUT, otherwise to build/gpu-python/logs.
#
#   scripts/gpu_bench.sh [BENCH ...]       grid, beyond, pages, options, decode, launch, io; default: all
#   scripts/gpu_bench.sh --quick ...       short lead-in and one round: for a quick look, not for reports
#   scripts/gpu_bench.sh ... -- OPTION ... options of bench/cuda_against_pytorch.py, as --direction forward
#
# On an H200 with 16 cores, the build takes a minute and a half; grid five minutes (0.8 s per cell and contestant: 36
# cells, four contestants forward, three backward), beyond two, pages half a minute, decode one and a half, launch as
# long as pages, io two. Within ten minutes:
#
#   scripts/gpu_bench.sh grid                                                   everything in it, both directions
#   scripts/gpu_bench.sh beyond pages decode launch io
#   scripts/gpu_bench.sh grid -- --contestants sm80 flash                       every GPU's kernels against FA2: 2.5
#   scripts/gpu_bench.sh grid -- --contestants tessera cudnn --direction forward   the best kernel against cuDNN: 1.5
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
logs=${OUT:-$PWD/build/gpu-python/logs}
all_benches=(grid beyond pages options decode launch io)
benches=()
steadiness=()
while (($#)); do
  case $1 in
    --quick) steadiness=(--lead-ms 40 --measure-ms 60 --rounds 1) && shift ;;
    --) shift && break ;;
    -*) echo "$1: no such option; accepted --quick, and -- before options of cuda_against_pytorch.py" >&2 && exit 2 ;;
    *) benches+=("$1") && shift ;;
  esac
done
more=("$@")
((${#benches[@]})) || benches=("${all_benches[@]}")
for bench in "${benches[@]}"; do
  [[ " ${all_benches[*]} " == *" $bench "* ]] && continue
  echo "$bench: no such benchmark; accepted ${all_benches[*]}" >&2
  exit 2
done

mkdir -p "$logs"
path=$(scripts/gpu_python.sh --quiet) || exit 1
export PYTHONPATH=$path PYTHONUNBUFFERED=1
echo "built in $SECONDS s"
: > "$logs/bench.log"

# The library alone, without other dependencies: one compiler call.
run_launch() {
  local program=build/gpu-python/tessera_bench_launch
  "${CXX:-c++}" -std=c++20 -O2 -Iinclude -Isrc bench/launch.cpp build/gpu-python/src/libtessera.a -ldl -pthread \
    -o $program &&
    $program --json "$logs/launch.json"
}

failed=0
for bench in "${benches[@]}"; do
  started=$SECONDS
  case $bench in
    launch) run_launch ;;
    io) "$python" bench/cuda_io.py "${steadiness[@]}" --json "$logs/io.json" ;;
    *)
      "$python" bench/cuda_against_pytorch.py --cases "$bench" "${steadiness[@]}" --json "$logs/$bench.json" \
        "${more[@]}"
      ;;
  esac 2>&1 | tee -a "$logs/bench.log"
  status=${PIPESTATUS[0]}
  echo "$bench: status $status, $((SECONDS - started)) s"
  ((status == 0)) || failed=1
done
exit $failed
