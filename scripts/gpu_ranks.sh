#!/usr/bin/env bash
# One batch on all GPUs of this host, in one command: builds the Python extension, then runs bench/many_gpus.py, which
# checks the results and measures the speed relative to the ideal at 32768 and 131072 rows (4 GPUs: also 262144), for
# packed batches and windows, and once for a million rows. Ends with a short table. Then examples/ranks_cuda.cpp does
# the same from C++, with the CUDA runtime and NCCL that PyTorch brings: forward and backward of 131072 rows, one
# process a GPU. Then, if ranks_op_tests was built in build/gpu, its tests over NCCL.
#
#   scripts/gpu_ranks.sh [OPTION ...]      options of bench/many_gpus.py, as --lengths 32768 --seconds 120
#
# With the extension built (one and a half minutes with 16 cores) it ends within 240 s on two GPUs, 400 s on four.
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
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
if ((gpus >= 4)); then lengths=32768,131072,262144 seconds=200; else lengths=32768,131072 seconds=100; fi
timeout $((seconds + 90)) "$python" bench/many_gpus.py --out "$out" --lengths $lengths --seconds $seconds \
  --longest 1048576 "$@" 2>&1 | tee "$out/ranks.log"
status=${PIPESTATUS[0]}

# Prints the first folder of those below PyTorch's packages and of the toolkits here that has a file.
folder() {
  "$python" -c 'import os, pathlib, shutil, sys
try:
    import nvidia
    roots = list(nvidia.__path__)
except ImportError:
    roots = []
nvcc = shutil.which("nvcc")
roots += [os.environ.get("CUDA_HOME"), nvcc and str(pathlib.Path(nvcc).resolve().parents[1]), "/usr/local/cuda"]
roots = [pathlib.Path(root).resolve() for root in roots if root]
found = [f for root in roots for f in sorted(root.rglob(sys.argv[1].split("/")[-1])) if f.match(sys.argv[1])]
print(found[0].parent if found else "")' "$1" 2> /dev/null
}
cpp() {
  local headers crt libraries
  headers=$(folder cuda_runtime_api.h) crt=$(folder crt/host_defines.h) libraries=$(folder 'libcudart.so.*')
  if [[ -z $headers || -z $crt || -z $libraries ]]; then
    echo "C++: not run: found cuda_runtime_api.h in '$headers', crt/host_defines.h in '$crt', libcudart in '$libraries'"
    return 0
  fi
  "${CXX:-g++}" -std=c++20 -O2 -Iinclude -I"$headers" -I"${crt%/crt}" examples/ranks_cuda.cpp \
    build/gpu-python/src/libtessera.a "$(compgen -G "$libraries/libcudart.so.*" | head -1)" \
    -Wl,-rpath,"$libraries" -pthread -ldl -o build/gpu-python/ranks_cuda || return 1
  timeout 60 build/gpu-python/ranks_cuda "$gpus" 131072
}
nccl=$(folder libnccl.so.2)
[[ -z $nccl ]] || export TESSERA_NCCL=$nccl/libnccl.so.2
cpp 2>&1 | tee "$out/ranks_cpp.log"
result=${PIPESTATUS[0]}
[[ $status != 0 ]] || status=$result
if [[ -x build/gpu/tests/ranks_op_tests ]]; then
  timeout 60 build/gpu/tests/ranks_op_tests --gtest_filter='*NcclGpuRanks*' --gtest_brief=1 2>&1 |
    tee "$out/ranks_op_tests.log"
  result=${PIPESTATUS[0]}
  [[ $status != 0 ]] || status=$result
fi
echo "$SECONDS s, status $status; $out"
exit "$status"
