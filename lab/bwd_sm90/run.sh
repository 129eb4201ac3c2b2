#!/bin/bash
# Checks and times bwd_sm90's deterministic configs beside the others and cuDNN, in one call of less than 100 s on a GPU: run.sh OUT. What is in
# build/bwd_sm90_lab is used as it is (run.sh --build makes it, without a GPU). Writes OUT/build.txt, check.txt, time.txt, results.jsonl,
# results.csv; the table comes last.
here=$(cd "$(dirname "$0")" && pwd); root=$(cd "$here/../.." && pwd); libraries=$root/build/bwd_sm90_lab
names="d64_a22 d64_det d128_s22 d128_det"  # a head size's first: to which the table's ratios are
cd "$root" || exit 1
if [ "$1" = --build ]; then "$here/build.sh" "$libraries" $names; exit; fi
out=${1:?"run.sh OUT | --build"}; mkdir -p "$out"
ls "$libraries"/*.so > /dev/null 2>&1 || timeout 100 bash "$0" --build > "$out/build.txt" 2>&1
timeout 35 python3 "$here/harness.py" "$libraries" "$out" --check --patience 12 --variants $names > "$out/check.txt" 2>&1
grep -E "HANGS|left out|Error" "$out/check.txt"
timeout 60 python3 "$here/harness.py" "$libraries" "$out" --time --skip-wrong --patience 12 --lead 40 --span 80 --rounds 3 \
  --lengths 4096 512 16384 2048 --head-dims 128 64 --variants $names > "$out/time.txt" 2>&1
grep -E "HANGS|left out|Error" "$out/time.txt"
python3 "$here/harness.py" "$libraries" "$out" --table
