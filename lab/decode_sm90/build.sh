#!/bin/bash
# Builds the variants of variants.txt ("name {config}") as shared libraries: build.sh OUT_FOLDER [name ...]. Prints registers
# and spills of each. What a name's suffixes mean stands there.
here=$(cd "$(dirname "$0")" && pwd); out=$1; shift; mkdir -p "$out"
build_one() {
  name=$1; config=$2; work=$out/.$name; device=$here/../../kernels/tessera; own=$work/tessera/decode_sm90
  rm -rf $work; mkdir -p $own $work/tessera/ptx
  { echo "#define CONFIG $config"; [[ $name =~ b([234]) ]] && echo "#define MIN_BLOCKS ${BASH_REMATCH[1]}" || echo "#define MIN_BLOCKS 1"; } > $work/config.h
  cp $device/decode_sm90/* $own
  [[ $name == *_nopf* ]] && sed "s/cg.shared.global.L2::128B/cg.shared.global/" $device/ptx/cp_async.cuh > $work/tessera/ptx/cp_async.cuh
  [[ $name == *_pf256* ]] && sed "s/L2::128B/L2::256B/" $device/ptx/cp_async.cuh > $work/tessera/ptx/cp_async.cuh
  [[ $name == *_qs* ]] && sed -i 's/return c.head_dim > 192 .*/return true;/' $own/config.hpp
  [[ $name == *_nc* ]] && sed -i -e '/^      score_stage<kCfg>/,/all_see.holds/d' -e '/^      product_pb/d' $own/kernel.cuh
  [[ $name == *_nv* ]] && sed -i '/^      product_pb/d' $own/kernel.cuh
  [[ $name == *_co* ]] && echo "#define BOUND_BLOCKS 2" >> $work/config.h
  [[ $name == *_l128* ]] && echo "#define L2_PROMOTION CU_TENSOR_MAP_L2_PROMOTION_L2_128B" >> $work/config.h
  [[ $name == *_pdl* ]] && echo "#define PDL" >> $work/config.h
  [[ $name == *_trace* ]] && echo "#define TRACE" >> $work/config.h
  nvcc -std=c++20 -O3 -I$work -I$here/../../kernels -gencode arch=compute_90a,code=sm_90a -Xptxas -v -shared -Xcompiler -fPIC \
    $here/variant.cu -o $out/$name.so > $work/log 2>&1 || { echo "$name FAILED"; grep -m5 error $work/log; }
  strip $out/$name.so
  echo "$name $(grep -oE '[0-9]+ bytes spill stores|Used [0-9]+ registers' $work/log | tr '\n' ' ')"
}
export -f build_one; export here out
grep -vE '^(#|$)' $here/variants.txt | while read -r name config; do
  [ $# -eq 0 ] || [[ " $* " == *" $name "* ]] || continue
  printf '%s\0%s\0' "$name" "$config"
done | xargs -0 -n 2 -P ${JOBS:-2} bash -c 'build_one "$0" "$1"'
[ $# -gt 0 ] || nvcc -O3 -gencode arch=compute_90a,code=sm_90a -shared -Xcompiler -fPIC $here/reader.cu -o $out/reader.so
[ $# -gt 0 ] || nvcc -std=c++20 -O3 -I$here/../../kernels -gencode arch=compute_90a,code=sm_90a -shared -Xcompiler -fPIC $here/stream.cu -o $out/stream.so
