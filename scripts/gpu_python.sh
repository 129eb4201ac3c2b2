#!/usr/bin/env bash
# The Python package for a machine with a GPU, without a wheel: builds only the extension, beside links to the other
# files, and the program tessera_tiles for scripts/search_fwd_sm90.py.
#
#   scripts/gpu_python.sh          builds, and prints the folders for PYTHONPATH; the build's output goes to stderr
#   scripts/gpu_python.sh --quiet  the build's output goes to build/gpu-python/build.log, its end to stderr on failure
#
# Needs CMake, Ninja, a C++ compiler, Python.h and nanobind; nanobind and pytest may also be wheels in .whl.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
python=${PYTHON:-python3}
build=build/gpu-python
packages=$root/$build/packages
site=$root/$build/site

mkdir -p "$build"
if [[ ${1:-} == --quiet ]]; then
  exec 3>&2 2> "$build/build.log"
  trap 'tail -20 "$build/build.log" >&3; echo "the extension was not built: $build/build.log" >&3' ERR
fi
if compgen -G '.whl/*.whl' > /dev/null && [[ ! -d $packages ]]; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$packages" .whl/*.whl >&2
fi
[[ ! -d $packages ]] || export PYTHONPATH=$packages${PYTHONPATH:+:$PYTHONPATH}

[[ -f $build/build.ninja ]] ||
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DTESSERA_BUILD_CLI=OFF \
    -DTESSERA_BUILD_TESTS=OFF -DTESSERA_BUILD_BENCH=OFF -DTESSERA_BUILD_PYTHON=ON \
    "-DPython_EXECUTABLE=$(command -v "$python")" >&2
cmake --build "$build" --parallel "${JOBS:-$(nproc)}" --target tessera_python tessera_tiles >&2

rm -rf "$site"
mkdir -p "$site/tessera"
ln -s "$root"/python/tessera/* "$root/$build"/python/_core*.so "$site/tessera/"
echo "$site${PYTHONPATH:+:$PYTHONPATH}"
