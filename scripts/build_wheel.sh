#!/usr/bin/env bash
# build_wheel.sh PYTHON DIRECTORY: the wheel into DIRECTORY/wheels, installed into DIRECTORY/site (for PYTHONPATH).
set -euo pipefail
python=$1
directory=$2
cd "$(dirname "$0")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1
# By the name that CMake calls the compiler by, not Python's: ccache then has the objects of the library that was just built.
export CC=${CC:-cc} CXX=${CXX:-c++}

rm -rf "$directory/wheels" "$directory/site"
# What builds it is pinned in tests/requirements.txt, and is here already.
CMAKE_BUILD_PARALLEL_LEVEL=${JOBS:-$(nproc)} "$python" -m pip wheel --quiet --no-build-isolation --no-deps \
  --wheel-dir "$directory/wheels" .
"$python" -m pip install --quiet --no-index --no-deps --target "$directory/site" "$directory"/wheels/*.whl
