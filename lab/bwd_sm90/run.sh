#!/bin/bash
# Checks and times the kernel of this tree, of 2026-11-25-persistent.patch (also with -persistent-variants.patch on it) and of
# 2026-11-25-variants.patch beside cuDNN, in one call of less than 200 s on a GPU: run.sh OUT. What is in build/bwd_sm90_lab is used as it is (run.sh --build makes it, without a GPU).
# Writes OUT/build.txt, check.txt, time.txt, results.jsonl, results.csv; the table comes last.
here=$(cd "$(dirname "$0")" && pwd); root=$(cd "$here/../.." && pwd); libraries=$root/build/bwd_sm90_lab
# The GPU's machine may have no repository: kernels and this folder alone, by whichever program is there.
apply() {
  git apply --include='kernels/*' --include='lab/*' "$1" 2> /dev/null || patch -s -p1 -f < "$1" > patch.log 2>&1
}
build() {
  mkdir -p "$libraries"; work=$(mktemp -d)
  PREFIX=main_ "$here/build.sh" "$libraries" d64_a22 d64_det d128_s22 d128_det
  for tree in persistent variants; do
    mkdir "$work/$tree"; cp -r --parents -t "$work/$tree" kernels lab/bwd_sm90; cd "$work/$tree" || exit 1
    apply "$here/2026-11-25-$tree.patch"
    if [ $tree = persistent ]; then
      TREE=$PWD PREFIX=pers_ "$here/build.sh" "$libraries" d64_a22 d64_det d128_det
      apply "$here/2026-11-25-persistent-variants.patch"
      TREE=$PWD PREFIX=pers_ "$here/build.sh" "$libraries"
    else
      TREE=$PWD PREFIX= "$here/build.sh" "$libraries"
    fi
    cd "$root" || exit 1
  done
  rm -rf "$work"
}
cd "$root" || exit 1
if [ "$1" = --build ]; then build; exit; fi
out=${1:?"run.sh OUT | --build"}; mkdir -p "$out"
ls "$libraries"/*.so > /dev/null 2>&1 || timeout 100 bash "$0" --build > "$out/build.txt" 2>&1
# The order of the timed: this tree's first, to which the table's ratios are.
order() {
  for name in main_d64_a22 main_d128_s22 main_d64_det main_d128_det; do echo $name; done
  ls "$libraries" | sed -n 's/\.so$//p' | grep -v '^main_'
}
names=$(order | while read -r name; do [ ! -f "$libraries/$name.so" ] || echo "$name"; done)
timeout 85 python3 "$here/harness.py" "$libraries" "$out" --check --patience 12 --variants $names > "$out/check.txt" 2>&1
grep -E "HANGS|left out|Error" "$out/check.txt"
timeout 105 python3 "$here/harness.py" "$libraries" "$out" --time --skip-wrong --patience 12 --lead 40 --span 70 --rounds 2 \
  --lengths 4096 512 16384 1024 --head-dims 128 64 --variants $names > "$out/time.txt" 2>&1
python3 "$here/harness.py" "$libraries" "$out" --table
