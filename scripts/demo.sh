#!/usr/bin/env bash
# demo.sh: compares Tessera with standard attention on this machine and, if a python3 on the PATH has PyTorch and NumPy,
# with PyTorch's own attention: bfloat16, causal, head size 128. It prints a table and draws bars into out/compare.png.
# The program must have been built.
set -euo pipefail
cd "$(dirname "$0")/.."
compare=(compare --dtype bfloat16 --causal -D 128 --lengths 1024,2048,4096,8192 --repeat 3 --report out/compare.json)
venv=$PWD/build/venv

# The package for that Python: the extension is built beside the sources, with the environment's nanobind.
package_for() {
  mkdir -p build/nanobind
  ln -sfn "$("$venv/bin/python" -c 'import nanobind, os; print(os.path.dirname(nanobind.__file__))')" \
    build/nanobind/nanobind
  local path
  path=$(PYTHON=$1 PYTHONPATH=$PWD/build/nanobind scripts/gpu_python.sh --quiet 2> build/demo.log) || return
  PYTHONPATH=$path "$1" -c 'import tessera' 2> /dev/null && echo "$path"
}

mkdir -p out
for python in $(type -ap python3); do
  "$python" -c 'import torch, numpy' 2> /dev/null || continue
  echo "Comparing with PyTorch of $python as well; building the Python package for it"
  if path=$(package_for "$python"); then
    PYTHONPATH=$path "$python" -m tessera "${compare[@]}"
    compared=1
    break
  fi
  echo "It was not built (build/demo.log): PyTorch is left out"
done
[[ -n ${compared:-} ]] || build/release/cli/tessera "${compare[@]}"
"$venv/bin/python" python/tessera/compare/plot.py out/compare.json out/compare.png
echo 'The picture is out/compare.png'
