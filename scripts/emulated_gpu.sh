#!/usr/bin/env bash
# Runs a command with a GPU emulated in software (tests/emulated_gpu) in place of CUDA's driver and compiler:
#   scripts/emulated_gpu.sh build/release/tests/op_tests --backend cuda \
#     --case 'dtype=bf16 sq=65 sk=129 hq=8 hkv=2 d=80 causal=1'
# Its folder is build/release/tests/emulated_gpu, or $EMULATED_GPU. Kernels are compiled for the host and cached below
# it, separately for each state of the emulated instructions and flags. tests/emulated_gpu documents the environment
# variables EMULATED_GPU_ARCH, _MULTIPROCESSORS, _DEVICES, _SEED, _CXX and _CXXFLAGS.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=${EMULATED_GPU:-$root/build/release/tests/emulated_gpu}
[[ -e $folder/libcuda.so.1 && -e $folder/libnvrtc.so.13 ]] || {
  echo "emulated_gpu.sh: no libcuda.so.1 and libnvrtc.so.13 in $folder: build emulated_driver and emulated_nvrtc" >&2
  exit 1
}
state=$({ cat "$folder/libnvrtc.so.13"
  cat "$root"/tests/emulated_gpu/*.hpp "$root"/tests/emulated_gpu/{runner,tessera/ptx}/*
  cat "$root"/src/core/{half,float8}.hpp
  echo "${EMULATED_GPU_CXX:-} ${EMULATED_GPU_CXXFLAGS:-}"; } | sha256sum | cut -c1-16)
export LD_LIBRARY_PATH=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export TESSERA_NVRTC=$folder/libnvrtc.so.13
export TESSERA_CACHE_DIR=$folder/kernels/$state EMULATED_GPU_HEADERS=$folder/headers
mkdir -p -m 700 "$TESSERA_CACHE_DIR"
find "$folder/kernels" "$folder/headers" -mindepth 1 -maxdepth 1 -mtime +7 -exec rm -rf {} + 2> /dev/null || true
touch "$TESSERA_CACHE_DIR"
exec "$@"
