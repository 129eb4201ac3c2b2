#!/usr/bin/env bash
# Tests the CUDA back end on a machine with a GPU. Prints one summary line per suite and writes the logs to $OUT,
# otherwise to build/gpu/logs. Ends in less than ten minutes even if a test hangs. Exit status 0: nothing failed.
#
#   scripts/gpu_test.sh [--prebuilt DIR] [--fuzz N] [SUITE ...]     default: all suites
#   scripts/gpu_test.sh --bundle DIR                                builds the folder for --prebuilt
#
# Without a driver, or without a usable GPU, it says so in one line and builds nothing.
#
# Suites: prepare (compile all kernels into the cache), unit, ptx (each PTX wrapper and tile operation by itself),
# table, programs (its cases with score programs), comparison (the table with the kernels for comparison), ampere (the
# table without bulk copies, as on GPUs before Hopper), graphs (the table and streams, each call a CUDA graph),
# invariance, cuda (pointers, streams, graphs, 64-bit offsets), fuzz, memcheck, racecheck, initcheck, synccheck
# (compute-sanitizer), python.
#
# Building needs CMake, Ninja and GoogleTest, CLI11, nlohmann-json; a machine without these runs a bundle: programs with
# the library and the C++ run time linked in. The suite python builds its extension itself: scripts/gpu_python.sh.
set -uo pipefail
cd "$(dirname "$0")/.."

build=build/gpu
programs=$build/tests
logs=${OUT:-$build/logs}
fuzz_cases=400
bundle=
prebuilt=
suites=()
all_suites=(prepare unit ptx table programs comparison ampere graphs invariance cuda fuzz memcheck racecheck initcheck
  synccheck python)
while (($#)); do
  case $1 in
    --prebuilt) prebuilt=$2 && shift 2 ;;
    --bundle) bundle=$2 && shift 2 ;;
    --fuzz) fuzz_cases=$2 && shift 2 ;;
    -*) echo "$1: no such option; accepted --prebuilt DIR, --bundle DIR, --fuzz N" >&2 && exit 2 ;;
    *) suites+=("$1") && shift ;;
  esac
done
((${#suites[@]})) || suites=("${all_suites[@]}")
for suite in "${suites[@]}"; do
  [[ " ${all_suites[*]} " == *" $suite "* ]] || { echo "$suite: no such suite; accepted ${all_suites[*]}" >&2; exit 2; }
done
processes=$(nproc)
((processes <= 12)) || processes=12

programs_needed=(op_tests tessera_fuzz prepare_gpu_kernels cuda_unit_tests ptx_tests)

build_programs() {
  [[ -f $build/build.ninja ]] ||
    cmake -S . -B $build -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DTESSERA_BUILD_CLI=OFF \
      -DTESSERA_BUILD_BENCH=OFF "-DCMAKE_EXE_LINKER_FLAGS=-static-libstdc++ -static-libgcc" || return
  cmake --build $build --parallel "${JOBS:-$(nproc)}" --target "${programs_needed[@]}"
}

# Builds nothing if the tests cannot run here. Conditions that Python cannot detect, the programs do.
if [[ -z $bundle ]] && command -v python3 > /dev/null && ! reason=$(python3 -c '
import ctypes, sys
try:
    status = ctypes.CDLL("libcuda.so.1").cuInit(0)
except OSError as error:
    sys.exit(print(f"no driver: {error}") or 1)
sys.exit(status and (print(f"the driver finds no GPU that it can use: cuInit gives {status}") or 1))'); then
  echo "all suites   skipped  $reason"
  exit 0
fi

mkdir -p "$logs" $build
if [[ -z $prebuilt && ${suites[*]} != python ]]; then
  if ! build_programs > "$logs/build.log" 2>&1; then
    tail -20 "$logs/build.log"
    echo "build        FAILED   $logs/build.log"
    exit 1
  fi
else
  programs=$prebuilt
fi
if [[ -n $bundle ]]; then
  mkdir -p "$bundle"
  for program in "${programs_needed[@]}"; do
    strip -o "$bundle/$program" "$programs/$program" || exit
  done
  du -sh "$bundle"
  exit
fi

failed=0
# within SECONDS: this time, or the remaining time of the whole run if it is less.
within() {
  local left=$((570 - SECONDS))
  echo $(($1 < left ? $1 : left > 1 ? left : 1))
}
# report SUITE STATUS DETAIL: prints the summary line. Status: passed, FAILED or skipped.
report() {
  printf '%-11s  %-8s %s (%d s)\n' "$1" "$2" "${3#skipped: }" $((SECONDS - started))
  [[ $2 != FAILED ]] || failed=$((failed + 1))
}
first_failure() { grep -hm1 -E 'replay:|FAILED:|\[  FAILED  \]|error|Error|crashed' "$@" | sed 's/^ *//' | head -1; }
skip_reason() { grep -hm1 -o 'skipped: .*' "$@" | head -1; }

# Runs each test of a filter once, in more shards than processes: a lost GPU context also loses the rest of its shard.
gtest_suite() { # NAME SECONDS SHARDS FILTER [PROGRAM]
  local name=$1 seconds shards=$3 filter=$4 program=$programs/${5:-op_tests}
  seconds=$(within "$2")
  rm -f "$logs/$name".*.log
  seq 0 $((shards - 1)) | timeout "$seconds" xargs -P "$processes" -I{} \
    env GTEST_TOTAL_SHARDS="$shards" GTEST_SHARD_INDEX={} \
    sh -c "'$program' --gtest_filter='$filter' > '$logs/$name.{}.log' 2>&1"
  local status=$?
  cat $(ls -v "$logs/$name".*.log) > "$logs/$name.log"
  rm -f "$logs/$name".*.log
  local passed bad
  passed=$(sed -nE 's/^\[  PASSED  \] ([0-9]+) tests?\.$/\1/p' "$logs/$name.log" |
    awk '{ n += $1 } END { print n + 0 }')
  bad=$(grep -cE '^\[  FAILED  \] .* \([0-9]+ ms\)$' "$logs/$name.log")
  local skipped
  skipped=$(grep -cE '^\[  SKIPPED \] .* \([0-9]+ ms\)$' "$logs/$name.log")
  if ((status == 124)); then
    report "$name" FAILED "stopped after $seconds s; $passed passed, $bad failed"
  elif ((status || bad)); then
    report "$name" FAILED "$bad failed, $passed passed; first: $(first_failure "$logs/$name.log")"
  elif ((passed == 0)); then
    report "$name" skipped "$(skip_reason "$logs/$name.log")"
  else
    report "$name" passed "$passed tests$( ((skipped)) && echo ", $skipped skipped")"
  fi
}

suite_prepare() {
  local count=0
  [[ " ${suites[*]} " != *" fuzz "* ]] || count=$((fuzz_cases / processes + 1))
  timeout "$(within 300)" "$programs/prepare_gpu_kernels" --seeds "$processes" --count $count --seconds 240 \
    > "$logs/prepare.log" 2>&1
  local status=$?
  if ((status == 2)); then
    report prepare skipped "$(tail -1 "$logs/prepare.log")"
  else
    report prepare "$( ((status)) && echo FAILED || echo passed)" "$(tail -1 "$logs/prepare.log")"
  fi
}

# Compiling the prebuilt set needs no GPU and takes long: make check does it.
suite_unit() { gtest_suite unit 90 1 '-Prebuilt/*' cuda_unit_tests; }
suite_ptx() { gtest_suite ptx 90 1 'Device/PtxGpu.*' ptx_tests; }
suite_table() { gtest_suite table 240 48 'Cuda/GpuTable.*'; }
suite_programs() { gtest_suite programs 240 24 'CudaPrograms/GpuTable.*'; }
suite_comparison() { gtest_suite comparison 120 24 'Cuda/GpuComparison.*'; }
suite_ampere() { TESSERA_FWD_SM80_BULK=0 gtest_suite ampere 240 48 'Cuda/GpuTable.*'; }
suite_graphs() {
  TESSERA_CUDA_GRAPHS=first gtest_suite graphs 240 48 'Cuda/GpuTable.*:*CudaStreams*:*CudaLaunches*-*TakesNoGpuMemory*'
}
suite_invariance() { gtest_suite invariance 60 4 'Cuda/GpuBatchInvariance.*'; }
# Plans need no GPU: `make test` covers them.
suite_cuda() { gtest_suite cuda 180 1 '*Cuda*.*-*GpuTable*:*GpuComparison*:*GpuBatchInvariance*:CudaPlan.*'; }

suite_fuzz() {
  rm -f "$logs"/fuzz.*.log
  local count=$((fuzz_cases / processes + 1))
  seq 1 "$processes" | timeout "$(within 240)" xargs -P "$processes" -I{} \
    sh -c "'$programs/tessera_fuzz' --backend cuda --seed {} --count $count --seconds 200 > '$logs/fuzz.{}.log' 2>&1"
  local status=$?
  cat $(ls -v "$logs"/fuzz.*.log) > "$logs/fuzz.log"
  rm -f "$logs"/fuzz.*.log
  local reason passed
  reason=$(skip_reason "$logs/fuzz.log")
  passed=$(sed -nE 's/^([0-9]+) cases passed in [0-9]+ s$/\1/p' "$logs/fuzz.log" |
    awk '{ n += $1 } END { print n + 0 }')
  if [[ -n $reason ]]; then
    report fuzz skipped "$reason"
  elif ((status)); then
    report fuzz FAILED "$(grep -hm1 -E '^replay:|crashed' "$logs/fuzz.log" || grep -hm1 '^FAILED:' "$logs/fuzz.log" ||
      echo 'stopped, out of time')"
  else
    report fuzz passed "${passed:-0} cases"
  fi
}

# A tool's records in a log, one per line: initcheck's "read BYTES KERNEL", racecheck's "RAW KERNEL", "WAR ...", "WAW
# ...".
findings() {
  awk '/Potential (RAW|WAR|WAW) hazard/ { match($0, /RAW|WAR|WAW/); kind = substr($0, RSTART, 3) }
       /read of size [0-9]+ bytes/ { match($0, /size [0-9]+/); read = "read " substr($0, RSTART + 5, RLENGTH - 5) }
       /^=+ +(Write Thread .* )?at tessera_/ {
         match($0, /tessera_[a-z0-9_]+/); print (/Write Thread/ ? kind : read) " " substr($0, RSTART, RLENGTH)
       }' "$1"
}

# With exact memory: a tensor's allocation ends where the tensor does, and the workspace is not written before the call.
# The cases are distributed over a few processes, since most of the time is spent on compiling and on a tool's work on
# the host.
# EXCUSED: an expression for the findings that docs/reference/testing.md proves false, or "".
sanitizer_suite() { # TOOL EXCUSED OPTION...
  local tool=$1 excused=$2 shards=$((processes < 6 ? processes : 6))
  shift 2
  local sanitizer
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2> /dev/null)
  if [[ -z $sanitizer ]]; then
    report "$tool" skipped "skipped: no compute-sanitizer on the PATH or in /usr/local/cuda/bin"
    return
  fi
  rm -f "$logs/$tool".*.cases "$logs/$tool".*.log
  grep -v '^#' tests/op/sanitizer_cases.txt | split -n r/$shards -d --additional-suffix=.cases - "$logs/$tool."
  ls "$logs/$tool".*.cases | TESSERA_TEST_EXACT_MEMORY=1 timeout "$(within 200)" xargs -P "$shards" -I{} \
    sh -c '"$@" --cases {} > {}.log 2>&1' sh \
    "$sanitizer" --tool "$tool" --error-exitcode 9 "$@" "$programs/op_tests" --backend cuda
  local status=$?
  cat "$logs/$tool".*.cases.log > "$logs/$tool.log"
  rm -f "$logs/$tool".*.cases "$logs/$tool".*.cases.log
  local cases wanted summary reason
  cases=$(grep -c '^passed: ' "$logs/$tool.log")
  wanted=$(grep -vc '^#' tests/op/sanitizer_cases.txt)
  # "ERROR SUMMARY: 2 errors", "RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)", for each process.
  local found false=0
  found=$(grep -hoE '(ERROR|RACECHECK) SUMMARY: [0-9]+' "$logs/$tool.log" | awk '{ n += $NF } END { print n + 0 }')
  if [[ -n $excused ]]; then  # by their records: the summary counts a full buffer as a finding
    found=$(findings "$logs/$tool.log" | wc -l)
    false=$(findings "$logs/$tool.log" | grep -cxE "$excused")
  fi
  summary="$((found - false)) findings"
  ((false == 0)) || summary+=", beside $false or more that are false: $excused (docs/reference/testing.md)"
  reason=$(skip_reason "$logs/$tool.log")
  if [[ -n $reason ]]; then
    report "$tool" skipped "$reason"
  elif ((found != false || (status && !false) || cases != wanted)); then
    report "$tool" FAILED \
      "status $status, $cases of $wanted cases passed; $summary $(grep -hm1 '^FAILED: ' "$logs/$tool.log")"
  else
    report "$tool" passed "$cases cases; $summary"
  fi
}

suite_memcheck() { sanitizer_suite memcheck '' --print-limit 20 --padding 256; }
suite_racecheck() {
  sanitizer_suite racecheck \
    'WAR tessera_(fwd_sm90|fwd_sm80_pairs|bwd_sm90(_d256|_d512)?)|RAW tessera_(bwd_sm80_split|bwd_sm90)' \
    --print-limit 1000000 --show-backtrace no --racecheck-report hazard
}
suite_initcheck() {
  sanitizer_suite initcheck \
    'read [0-9]+ tessera_(bwd_rows|bwd_sm90_after)|read (2|8) tessera_combine|read 8 tessera_decode_sm90' \
    --print-limit 1000000 --show-backtrace no
}
suite_synccheck() { sanitizer_suite synccheck '' --print-limit 20; }

# Uses an installed package, otherwise an extension built here.
suite_python() {
  local python=${PYTHON:-python3} path
  : > "$logs/python.log"
  if ! "$python" -c 'import tessera' 2> /dev/null; then
    if path=$(timeout "$(within 240)" scripts/gpu_python.sh 2>> "$logs/python.log"); then
      local -x PYTHONPATH=$path
    else
      report python skipped "skipped: no package tessera, nor its extension built: $(tail -1 "$logs/python.log")"
      return
    fi
  fi
  if ! "$python" -c 'import pytest, torch; assert torch.cuda.is_available()' >> "$logs/python.log" 2>&1; then
    report python skipped "skipped: $python has no pytest, or no PyTorch with a GPU"
  elif ! "$python" -c 'import tessera; tessera.device("cuda")' >> "$logs/python.log" 2>&1; then
    report python skipped "skipped: $(tail -1 "$logs/python.log")"
  else
    # Other packages there may have plugins for another pytest.
    local -a parallel=()  # by pytest-xdist, where it is installed: most of the time is a process's own
    "$python" -c 'import xdist' 2> /dev/null && parallel=(-p xdist -n $((processes < 6 ? processes : 6)))
    PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 timeout "$(within 300)" "$python" -m pytest -q -rfE -p no:cacheprovider \
      "${parallel[@]}" -k cuda tests/python >> "$logs/python.log" 2>&1
    local status=$?
    report python "$( ((status)) && echo FAILED || echo passed)" "$(tail -1 "$logs/python.log")"
  fi
}

# The whole run stays under ten minutes: a suite that would start too late is skipped.
for suite in "${suites[@]}"; do
  started=$SECONDS
  if ((SECONDS > 540)); then
    report "$suite" FAILED "not started: the run has taken more than 540 s"
    continue
  fi
  "suite_$suite"
done
echo "logs: $logs"
((failed == 0))
