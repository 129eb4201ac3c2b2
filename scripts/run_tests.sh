#!/usr/bin/env bash
# run_tests.sh test: builds the release preset and runs the tests for everyday changes.
# run_tests.sh check: runs the other tests, labelled `check` and `cuda_compile`, then those labelled `sanitize` under
# the address, undefined-behaviour and thread sanitizers. With PART=K/N in the environment it runs the K-th of N parts:
# every N-th of these tests, and a part of those under the address sanitizers if K is odd, under the thread sanitizer if
# it is even. The N parts together are all of it.
# Both end with one line, "N passed, N failed".
set -uo pipefail
cd "$(dirname "$0")/.."
depth=${1:-}
if [[ $depth != test && $depth != check ]]; then
  echo "run_tests.sh: '$depth', accepted test and check" >&2
  exit 2
fi
part=${PART:-}
[[ $part != 1/1 ]] || part=
if [[ -n $part ]] &&
  ! [[ $part =~ ^([0-9]+)/([0-9]+)$ && BASH_REMATCH[1] -ge 1 && BASH_REMATCH[1] -le BASH_REMATCH[2] ]]; then
  echo "run_tests.sh: PART '$part', accepted K/N, such as 1/4" >&2
  exit 2
fi
jobs=${JOBS:-$(nproc)}
log=build/test.log
passed=0
failed=0

# Reads Ninja's lines from standard input and prints the build's progress every ten seconds, since the first build takes
# minutes.
show_progress() {
  local began=$SECONDS said=$SECONDS line steps=
  while true; do
    if IFS= read -r -t 10 line; then
      [[ ! $line =~ ^\[([0-9]+)/([0-9]+)\] ]] || steps="${BASH_REMATCH[1]} of ${BASH_REMATCH[2]} steps"
    elif (($? <= 128)); then  # the end of the input, not the ten seconds
      return 0
    fi
    if [[ -n $steps ]] && ((SECONDS >= said + 10)); then
      said=$SECONDS
      echo "   $steps, $((SECONDS - began)) s"
    fi
  done
}

run_suite() {  # PRESET [CTEST_OPTION ...]
  local preset=$1
  shift
  echo "== $preset: build"
  if ! { [[ -f build/$preset/build.ninja ]] || cmake --preset "$preset"; } > "$log" 2>&1 ||
    ! cmake --build --preset "$preset" --parallel "$jobs" 2>&1 | tee -a "$log" | show_progress; then
    cat "$log"
    echo "== $preset: the build failed"
    failed=$((failed + 1))
    return
  fi
  echo "== $preset: test"
  ctest --preset "$preset" --parallel "$jobs" --no-tests=error "$@" 2>&1 < /dev/null | tee "$log"
  local counts
  counts=$(sed -nE 's/^[0-9]+% tests passed, ([0-9]+) tests failed out of ([0-9]+)$/\1 \2/p' "$log")
  if [[ -z $counts ]]; then
    echo "== $preset: no tests were run"
    failed=$((failed + 1))
    return
  fi
  read -r suite_failed suite_total <<< "$counts"
  failed=$((failed + suite_failed))
  local skipped
  skipped=$(grep -c '\*\*\*Skipped' "$log")
  passed=$((passed + suite_total - suite_failed - skipped))
}

mkdir -p build
rm -f "build/$depth-summary.txt"
# Frameworks are large and not available everywhere: if one is missing, its tests are skipped.
venv_python=build/venv/bin/python
install_framework() {  # REQUIREMENTS MODULES NAMES
  [[ -x $venv_python ]] && ! "$venv_python" -c "import $2" 2> /dev/null || return 0
  echo "== $3, for their tests"
  "$venv_python" -m pip install --quiet --disable-pip-version-check --requirement "tests/python/$1" ||
    echo "== They cannot be installed here: tests that need them are skipped"
}
install_framework requirements-torch.txt 'torch, transformers' 'PyTorch and Transformers'
install_framework requirements-jax.txt 'jax, jaxlib' 'JAX and its library'
if [[ -x $venv_python ]] &&
  ! "$venv_python" -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("megatron"))'; then
  "$venv_python" -m pip install --quiet --disable-pip-version-check --no-deps \
    --requirement tests/python/requirements-megatron.txt ||
    echo "== Megatron cannot be installed here: its tests are skipped"
fi
if [[ $depth == test ]]; then
  run_suite release --label-exclude '^(check|cuda_compile)$'
else
  bash scripts/install_packages.sh debian-packages-check.txt ||
    echo "== They cannot be installed here: tests that need them are skipped"
  check_tests=(--label-regex '^(check|cuda_compile)$')
  if [[ -z $part ]]; then
    run_suite release "${check_tests[@]}"
    run_suite asan
    run_suite tsan
  else
    k=${part%/*} n=${part#*/}
    run_suite release "${check_tests[@]}" -I "$k,,$n"
    if ((k % 2)); then
      run_suite asan -I "$(((k + 1) / 2)),,$(((n + 1) / 2))"
    else
      run_suite tsan -I "$((k / 2)),,$((n / 2))"
    fi
  fi
fi
echo "$passed passed, $failed failed" | tee "build/$depth-summary.txt"
((failed == 0))
