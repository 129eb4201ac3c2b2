#!/usr/bin/env bash
# Serving on a machine with a GPU, in one command: first checks the kernels that serve engines, then runs the cells of
# bench/cuda_serving.py beside cuDNN, which end with a table of targets and measurements. Takes less than 250 s once the
# programs are built.
#
#   scripts/gpu_serving.sh [--prebuilt DIR] [--seconds S] [--dry-run] [CASE ...]
#
# CASE: cases of bench/cuda_serving.py; default: all but `short`.
#
# Writes table-cases.log, cells.json, cells.csv and bench.log to $OUT, otherwise to build/gpu/serving. --prebuilt: the
# output of `scripts/gpu_test.sh --bundle DIR`; otherwise op_tests is built. --seconds: no cell is started after this
# time (120). --dry-run: lists the table cases and cells, without a GPU. Exit status 0: every result is correct.
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
out=${OUT:-$PWD/build/gpu/serving}
programs=build/gpu/tests
prebuilt= dry= seconds=120 cases=()
while (($#)); do
  case $1 in
    --prebuilt) prebuilt=$2 && shift 2 ;;
    --seconds) seconds=$2 && shift 2 ;;
    --dry-run) dry=1 && shift ;;
    -*) echo "$1: no such option; accepted --prebuilt DIR, --seconds S, --dry-run" >&2 && exit 2 ;;
    *) cases+=("$1") && shift ;;
  esac
done
((${#cases[@]})) || cases=(decode dims lengths mixed trees few tokens chunks prefix append)
processes=$(nproc)
((processes <= 8)) || processes=8

# The table's cases of few rows, of mixed batches and of shared prefixes; each runs with every kernel that supports it,
# in bfloat16.
table_cases() {
  sed -nE '/^constexpr const char\* k(Decode|Mixed|Prefixes)\[\]/,/^};/s/^ *"(.*)",$/dtype=bf16 \1/p' \
    tests/op/table.cpp | grep ' b='
}

if [[ $dry ]]; then
  table_cases
  echo "$(table_cases | wc -l) cases of the table"
  exec "$python" bench/cuda_serving.py --dry-run --cases "${cases[@]}"
fi

mkdir -p "$out"
if [[ $prebuilt ]]; then
  programs=$prebuilt
elif ! { [[ -f build/gpu/build.ninja ]] ||
  cmake -S . -B build/gpu -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DTESSERA_BUILD_CLI=OFF \
    -DTESSERA_BUILD_BENCH=OFF; } > "$out/build.log" 2>&1 ||
  ! cmake --build build/gpu --parallel "${JOBS:-$(nproc)}" --target op_tests >> "$out/build.log" 2>&1; then
  echo "op_tests was not built, the table's cases are not run: $out/build.log"
  programs=
fi
path=$(scripts/gpu_python.sh --quiet) || path=
echo "built after $SECONDS s"

failed=0
run_cases() { # NAME SECONDS CASES
  local started=$SECONDS status right all
  rm -f "$out/$1".*
  "$3" | split -n r/$processes -d --additional-suffix=.cases - "$out/$1."
  ls "$out/$1".*.cases | timeout "$2" xargs -P "$processes" -I{} \
    sh -c "'$programs/op_tests' --cases {} --backend cuda > {}.log 2>&1"
  status=$?
  cat "$out/$1".*.cases.log > "$out/$1-cases.log"
  rm -f "$out/$1".*
  right=$(grep -c '^passed: ' "$out/$1-cases.log") all=$("$3" | wc -l)
  echo "$1: $right of $all cases right (status $status, $((SECONDS - started)) s)" \
    "$(grep -m1 '^FAILED: ' "$out/$1-cases.log")"
  ((right == all)) || failed=1
}
if [[ $programs ]]; then
  run_cases table 90 table_cases
fi
if [[ $path ]]; then
  PYTHONPATH=$path PYTHONUNBUFFERED=1 timeout $((seconds + 30)) "$python" bench/cuda_serving.py \
    --cases "${cases[@]}" --seconds "$seconds" --out "$out" 2>&1 |
    tee "$out/bench.log" | grep -vE '^(decode|dims|lengths|mixed|trees|few|tokens|chunks|prefix|append|short) '
  status=${PIPESTATUS[0]}
  if ((status == 124)); then  # the incomplete log
    echo "stopped after $((seconds + 30)) s"
    "$python" bench/cuda_serving.py --summary "$out/cells.json"
  fi
  ((status == 0)) || failed=1
else
  echo "the Python extension was not built: no cell is measured"
  failed=1
fi
echo "$SECONDS s; $out"
((failed == 0))
