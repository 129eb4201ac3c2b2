#!/bin/bash
# Builds the variants of variants.txt ("name {config}") as shared libraries: build.sh OUT_FOLDER [name ...]. Prints spills,
# serialised products and registers of each.
here=$(cd "$(dirname "$0")" && pwd); out=$1; shift; mkdir -p "$out"
build_one() {
  name=$1; config=$2; work=$out/.$name; mkdir -p $work; echo "#define CONFIG $config" > $work/config.h
  [[ $name != d256* ]] || echo "#define HEAD_DIM_256" >> $work/config.h
  nvcc -std=c++20 -O3 -I$here/../../kernels -I$work -gencode arch=compute_90a,code=sm_90a -Xptxas -v -shared -Xcompiler -fPIC \
    $here/variant.cu -o $out/$name.so > $work/log 2>&1 || { echo "$name FAILED"; grep -m3 error $work/log; }
  echo "$name $(grep -cE 'C7[0-9]+' $work/log) warnings, $(grep -A1 "Compiling entry function 'bwd_main'" -A4 $work/log | grep -oE '[0-9]+ bytes spill stores' | head -1)"
  grep -ohE 'C7[0-9]+' $work/log | sort | uniq -c
}
export -f build_one; export here out
grep -vE '^(#|$)' $here/variants.txt | while read -r name config; do
  [ $# -eq 0 ] || [[ " $* " == *" $name "* ]] || continue
  printf '%s\0%s\0' "$name" "$config"
done | xargs -0 -n 2 -P 2 bash -c 'build_one "$0" "$1"'
