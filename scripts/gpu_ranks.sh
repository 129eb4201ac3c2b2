#!/usr/bin/env bash
# One batch on all GPUs of this host, in one command: builds the Python extension, then runs bench/many_gpus.py, which
# checks the results and measures the speed relative to the ideal at 32768, 131072 and 262144 rows, for packed batches
# and windows, and once for a million rows. Ends with a short table.
#
#   scripts/gpu_ranks.sh [OPTION ...]      options of bench/many_gpus.py, as --lengths 32768 --seconds 120
#
# Takes less than 8 minutes on 4 H100s with 64 cores: the build one and a half, then at most 390 s. Writes ranks.csv and
# ranks.log to $OUT, otherwise to build/gpu/ranks. Exit status 0: every result is correct.
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
echo "$SECONDS s, status $status; $out"
exit "$status"
