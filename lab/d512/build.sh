#!/bin/bash
# Builds the variants of variants.txt ("name source {config} [-D...]") as shared libraries: build.sh OUT_FOLDER [name ...].
# Prints what of each the compiler says: spills, serialised products, registers.
here=$(cd "$(dirname "$0")" && pwd); out=$1; shift; mkdir -p "$out"
build_one() {
  name=$1; source=$2; config=$3; flags=$4; work=$out/.$name; mkdir -p $work; echo "#define CONFIG $config" > $work/config.h
  nvcc -std=c++20 -O3 -I$here/../../kernels -I$here -I$work -gencode arch=compute_90a,code=sm_90a -Xptxas -v -shared -Xcompiler -fPIC \
    $flags $here/$source.cu -o $out/$name.so > $work/log 2>&1 || { echo "$name FAILED"; grep -m3 error $work/log; }
  echo "$name $(grep -oE '[0-9]+ bytes stack frame.*|Used [0-9]+ registers' $work/log | tr '\n' ' ') $(grep -ohE 'C7[0-9]+' $work/log | sort | uniq -c)"
}
export -f build_one; export here out
grep -vE '^(#|$)' $here/variants.txt | while read -r name source config flags; do
  [ $# -eq 0 ] || [[ " $* " == *" $name "* ]] || continue
  printf '%s\0%s\0%s\0%s\0' "$name" "$source" "$config" "$flags"
done | xargs -0 -n 4 -P ${JOBS:-2} bash -c 'build_one "$0" "$1" "$2" "$3"'
