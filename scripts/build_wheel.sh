#!/usr/bin/env bash
# build_wheel.sh PYTHON DIRECTORY: the wheel into DIRECTORY/wheels, installed into DIRECTORY/site (for PYTHONPATH).
set -euo pipefail
python=$1
directory=$2
cd "$(dirname "$0")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1
# By the compiler's name in CMake, not in Python: ccache then has the objects of the library that was just built.
export CC=${CC:-cc} CXX=${CXX:-c++}

rm -rf "$directory/wheels" "$directory/site"
# The build requirements are pinned in tests/requirements.txt and already installed.
CMAKE_BUILD_PARALLEL_LEVEL=${JOBS:-$(nproc)} "$python" -m pip wheel --quiet --no-build-isolation --no-deps \
  --wheel-dir "$directory/wheels" .
"$python" -m pip install --quiet --no-index --no-deps --target "$directory/site" "$directory"/wheels/*.whl
