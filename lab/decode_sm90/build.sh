#!/bin/bash
# Builds the variants of variants.txt ("name {config}") as shared libraries: build.sh OUT_FOLDER [name ...]. Prints registers
# and spills of each. What a name's suffixes mean stands there.
here=$(cd "$(dirname "$0")" && pwd); out=$1; shift; mkdir -p "$out"
build_one() {
  name=$1; config=$2; work=$out/.$name; device=$here/../../kernels/tessera; own=$work/tessera/decode_sm90
  rm -rf $work; mkdir -p $own $work/tessera/ptx
  { echo "#define CONFIG $config"; [[ $name == *b2* ]] && echo "#define MIN_BLOCKS 2" || echo "#define MIN_BLOCKS 1"; } > $work/config.h
  cp $device/decode_sm90/* $own
  [[ $name =~ _pf([0-9]+) ]] && sed "s/cg.shared.global \[/cg.shared.global.L2::${BASH_REMATCH[1]}B [/" $device/ptx/cp_async.cuh > $work/tessera/ptx/cp_async.cuh
  [[ $name == *_qs* ]] && sed -i 's/return c.head_dim > 192;/return true;/' $own/config.hpp
  [[ $name == *_nc* ]] && sed -i '/^      score_stage<kCfg>/,/^      product_pb/d' $own/kernel.cuh
  [[ $name == *_nv* ]] && sed -i '/^      product_pb/d' $own/kernel.cuh
  if [[ $name == *_pdl* ]]; then
    echo "#define PDL" >> $work/config.h
    sed -i -e 's|^  // 1. Which share is mine.|  ptx::griddepcontrol_launch_dependents(), ptx::griddepcontrol_wait();|' \
      -e 's|^#include "tessera/decode_sm90/loads.cuh"|&\n#include "tessera/ptx/griddepcontrol.cuh"|' $own/kernel.cuh
  fi
  if [[ $name == *_trace* ]]; then
    echo "#define TRACE" >> $work/config.h
    sed -i -e 's|^template <DecodeSm90Config kCfg>\nTESSERA_DEVICE void decode_sm90|&|' \
      -e 's|^namespace tessera {|__device__ long long lab_trace[264][8];\n#define MARK(n) if (threadIdx.x == 0 \&\& marks[n] == 0) marks[n] = clock64()\n&|' \
      -e 's|^  // 1. Which share is mine.|  long long marks[8] = {}; MARK(0);|' \
      -e 's|^  // 2. The first tiles.*|  MARK(1);|' -e 's|^  if (p.cu_seqlens_q) {|  MARK(2);\n&|' \
      -e 's|^      const int key0 = tile|      MARK(3);\n&|' -e 's|^    // 4. The warps.*|    marks[4] = clock64();|' \
      -e 's|^    if (segment.whole .. !segment.last) continue;|    marks[5] = clock64();\n&|' \
      -e 's|^  if (merges\[0\]) merge|  marks[6] = clock64();\n&|' \
      -e 's|^  const bool parted|  if (threadIdx.x == 0) for (int n = 0; n < 8; ++n) lab_trace[blockIdx.x][n] = marks[n];\n&|' \
      -e 's|^  if (merges\[1\]) merge.*|&\n  marks[7] = clock64(); if (threadIdx.x == 0) lab_trace[blockIdx.x][6] = marks[6], lab_trace[blockIdx.x][7] = marks[7];|' $own/kernel.cuh
  fi
  nvcc -std=c++20 -O3 -I$work -I$here/../../kernels -gencode arch=compute_90a,code=sm_90a -Xptxas -v -shared -Xcompiler -fPIC \
    $here/variant.cu -o $out/$name.so > $work/log 2>&1 || { echo "$name FAILED"; grep -m5 error $work/log; }
  strip $out/$name.so
  echo "$name $(grep -oE '[0-9]+ bytes spill stores|Used [0-9]+ registers' $work/log | tr '\n' ' ')"
}
export -f build_one; export here out
grep -vE '^(#|$)' $here/variants.txt | while read -r name config; do
  [ $# -eq 0 ] || [[ " $* " == *" $name "* ]] || continue
  printf '%s\0%s\0' "$name" "$config"
done | xargs -0 -n 2 -P 2 bash -c 'build_one "$0" "$1"'
[ -e $out/reader.so ] || nvcc -O3 -gencode arch=compute_90a,code=sm_90a -shared -Xcompiler -fPIC $here/reader.cu -o $out/reader.so
