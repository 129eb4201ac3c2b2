#!/bin/bash
# Builds the variants of variants.txt ("name {config}") as shared libraries: build.sh OUT_FOLDER [name ...]. Prints registers
# and spills of each.
here=$(cd "$(dirname "$0")" && pwd); out=$1; shift; mkdir -p "$out"
build_one() {
  name=$1; config=$2; work=$out/.$name; mkdir -p $work; echo "#define CONFIG $config" > $work/config.h
  if [[ $name == *_pf* ]]; then  # each load brings 256 bytes to the L2 cache
    mkdir -p $work/tessera/ptx
    sed 's/cg.shared.global \[/cg.shared.global.L2::256B [/' $here/../../kernels/tessera/ptx/cp_async.cuh > $work/tessera/ptx/cp_async.cuh
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
nvcc -O3 -gencode arch=compute_90a,code=sm_90a -shared -Xcompiler -fPIC $here/reader.cu -o $out/reader.so
