#!/usr/bin/env bash
# One batch on all GPUs of this host, in one command: builds the Python extension, then runs bench/many_gpus.py, which
# checks the results and measures the speed relative to the ideal at 32768, 131072 and 262144 rows, for packed batches
# and windows, and once for a million rows. Ends with a short table. Then examples/ranks_cuda.cpp does the same from
# C++, with the CUDA runtime and NCCL that PyTorch brings: forward and backward of 131072 rows, one process a GPU.
#
#   scripts/gpu_ranks.sh [OPTION ...]      options of bench/many_gpus.py, as --lengths 32768 --seconds 120
#
# Takes less than 9 minutes on 4 H100s with 64 cores: the build one and a half, then at most 390 s, and 60 s for C++.
# Writes ranks.csv, ranks.log and ranks_cpp.log to $OUT, otherwise to build/gpu/ranks. Exit status 0: every result is
# correct.
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
out=${OUT:-$PWD/build/gpu/ranks}
mkdir -p "$out"
# NVLink multicast is not needed here, and is disabled on hosts whose GPUs are shared.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
path=$(scripts/gpu_python.sh --quiet) || exit 1
echo "built after $SECONDS s"
export PYTHONPATH=$path PYTHONUNBUFFERED=1
timeout 390 "$python" bench/many_gpus.py --out "$out" --seconds 250 --longest 1048576 "$@" 2>&1 |
  tee "$out/ranks.log"
status=${PIPESTATUS[0]}

# Prints the folder below PyTorch's packages that has a file.
package() {
  "$python" -c 'import nvidia, pathlib, sys
found = [f for p in nvidia.__path__ for f in pathlib.Path(p).rglob(sys.argv[1])]
print(found[0].parent if found else "")' "$1" 2> /dev/null
}
cpp() {
  local headers libraries nccl gpus
  headers=$(package cuda_runtime_api.h) libraries=$(package 'libcudart.so.*') nccl=$(package libnccl.so.2)
  gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
  if [[ -z $headers || -z $libraries ]]; then
    echo "C++: not run: PyTorch's packages lack CUDA's headers or its runtime"
    return 0
  fi
  "${CXX:-g++}" -std=c++20 -O2 -Iinclude -I"$headers" examples/ranks_cuda.cpp build/gpu-python/src/libtessera.a \
    "$(compgen -G "$libraries/libcudart.so.*" | head -1)" -Wl,-rpath,"$libraries" -pthread -ldl \
    -o build/gpu-python/ranks_cuda || return 1
  [[ -z $nccl ]] || export TESSERA_NCCL=$nccl/libnccl.so.2
  timeout 60 build/gpu-python/ranks_cuda "$gpus" 131072
}
cpp 2>&1 | tee "$out/ranks_cpp.log"
cpp_status=${PIPESTATUS[0]}
[[ $status != 0 ]] || status=$cpp_status
echo "$SECONDS s, status $status; $out"
exit "$status"
