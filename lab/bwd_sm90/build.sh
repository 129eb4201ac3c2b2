#!/bin/bash
# Builds variants ("name {config}") as shared libraries: build.sh OUT_FOLDER [name ...]. Prints spills, serialised products and
# registers of each. The variants are those of TREE's variants.txt, TREE/kernels their device code, PREFIX is put before their
# names; without TREE they are this tree's.
tree=${TREE:-$(cd "$(dirname "$0")/../.." && pwd)}; lab=$tree/lab/bwd_sm90; out=$1; shift; mkdir -p "$out"
build_one() {
  name=$PREFIX$1; config=$2; work=$out/.$name; mkdir -p $work; echo "#define CONFIG $config" > $work/config.h
  [[ $1 != d256* ]] || echo "#define HEAD_DIM_256" >> $work/config.h
  nvcc -std=c++20 -O3 -I$tree/kernels -I$work -gencode arch=compute_90a,code=sm_90a -Xptxas -v -shared -Xcompiler -fPIC \
    $lab/variant.cu -o $out/$name.so > $work/log 2>&1 || { echo "$name FAILED"; grep -m3 error $work/log; }
  echo "$name $(grep -cE 'C7[0-9]+' $work/log) warnings, $(grep -A1 "Compiling entry function 'bwd_main'" -A4 $work/log | grep -oE '[0-9]+ bytes spill stores' | head -1)"
  grep -ohE 'C7[0-9]+' $work/log | sort | uniq -c
}
export -f build_one; export tree lab out PREFIX
grep -vE '^(#|$)' $lab/variants.txt | while read -r name config; do
  [ $# -eq 0 ] || [[ " $* " == *" $name "* ]] || continue
  printf '%s\0%s\0' "$name" "$config"
done | xargs -0 -n 2 -P "$(nproc)" bash -c 'build_one "$0" "$1"'
