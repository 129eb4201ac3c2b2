#!/usr/bin/env bash
# The backward pass, before and after: README.md beside this file. Run in the root of the tree. Results in $OUT; $BASE: an archive of the tree before.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd); root=$PWD; out=${OUT:-$root/build/batches/backward}; mkdir -p "$out"
python=${PYTHON:-python3}; export JOBS=${JOBS:-16} PYTHONUNBUFFERED=1

# ---- build (not counted) ----
base=$root/build/base; mkdir -p "$base"; tar xzf "${BASE:?}" -C "$base"
(cd "$base" && JOBS=8 scripts/gpu_python.sh --quiet > "$out/base_path" 2> "$out/base_build.log") & base_job=$!
after=$(JOBS=8 scripts/gpu_python.sh --quiet 2> "$out/build.log") || { tail -20 "$out/build.log"; exit 1; }
wait $base_job || tail -5 "$out/base_build.log"
before=$(cat "$out/base_path")
[[ -f build/gpu/build.ninja ]] || cmake -S . -B build/gpu -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DTESSERA_BUILD_CLI=OFF -DTESSERA_BUILD_BENCH=OFF > "$out/op_build.log" 2>&1
cmake --build build/gpu --parallel "$JOBS" --target op_tests >> "$out/op_build.log" 2>&1 || tail -5 "$out/op_build.log"
bash lab/bwd_sm90/build.sh "$root/build/pairs_lab" d256_192 d256_192_63 > "$out/pairs_lab_build.txt" 2>&1
tests=$(find build/gpu -name op_tests -type f | head -1)
# The cases: Hopper's backward ones, those above a head size of 128 first, in both types; bwd_sm80's split by head sizes.
sed -nE '/^constexpr const char\* kHopperBackward\[\]/,/^};/s/^ *"(.*)",$/\1/p' tests/op/table_hopper.cpp > "$out/lines"
{ grep -E 'd=(192|256|136)' "$out/lines"; grep -vE 'd=(192|256|136)' "$out/lines"; } | sed 's/^/dtype=bf16 backward=1 /' > "$out/bf16.cases"
sed 's/^dtype=bf16/dtype=f16/' "$out/bf16.cases" > "$out/f16.cases"
paste -d '\n' "$out/bf16.cases" "$out/f16.cases" > "$out/table.cases"
echo "built after $SECONDS s"; start=$SECONDS

# ---- right? 115 s ----
split -n r/15 -d --additional-suffix=.cases "$out/table.cases" "$out/part."
ls "$out"/part.*.cases | timeout 60 xargs -P 15 -I{} sh -c "'$tests' --cases {} --backend cuda > {}.log 2>&1"
cat "$out"/part.*.log > "$out/table.log"; rm -f "$out"/part.*
echo "table: $(grep -c '^passed: ' "$out/table.log") of $(wc -l < "$out/table.cases") right; $((SECONDS - start)) s"; grep '^FAILED: ' "$out/table.log" | head -20
PYTHONPATH=$after timeout 55 "$python" bench/backward_errors.py --csv "$out/errors.csv" --steps 80 2>&1 | tee "$out/errors.log"
echo "errors: $((SECONDS - start)) s"

# ---- times ----
bench() { # NAME PATH SECONDS OPTION ...
  local name=$1 path=$2 seconds=$3; shift 3
  PYTHONPATH=$path timeout $((seconds + 10)) "$python" bench/cuda_against_pytorch.py --direction backward --json "$out/$name.json" --seconds "$seconds" "$@" > "$out/$name.log" 2>&1
  echo "== $name, $((SECONDS - start)) s"; tail -40 "$out/$name.log"
}
quick="--lead-ms 60 --measure-ms 60 --rounds 1 --no-check"
for turn in 1 2; do
  for version in before after; do # bwd_sm80 alone: 12 cells
    path=$([[ $version == after ]] && echo "$after" || echo "$before")
    bench "sm80_${version}_$turn" "$path" 10 --contestants sm80 --head-dims 128 192 256 --lengths 1024 8192 $quick
  done
done
bench options "$after" 12 --cases options --filter "D 256" --contestants tessera sm80 flash cudnn $quick
# Lab: a third stage between the blocks at D 192; (192, 128) with its score warpgroups half a step apart.
timeout 20 "$python" lab/bwd_sm90/harness.py build/pairs_lab "$out" --time --head-dims 192 --variants d256_192 d256_192_63 --lengths 4096 16384 512 --lead 40 --span 60 --rounds 2 --patience 12 > "$out/pairs_lab.txt" 2>&1; tail -8 "$out/pairs_lab.txt"
bench wide "$after" 5 --cases beyond --filter "Dv 128" --contestants tessera cudnn --lead-ms 60 --measure-ms 60 --rounds 2
TESSERA_BWD_SM90_TILE=64,2,1,0 bench wide_alternate "$after" 5 --cases beyond --filter "Dv 128" --contestants tessera cudnn --lead-ms 60 --measure-ms 60 --rounds 2
bench packed "$after" 8 --cases beyond --filter packed --contestants tessera sm80 flash --lead-ms 60 --measure-ms 60 --rounds 1
bench grid "$after" 42 --contestants tessera flash cudnn --lead-ms 60 --measure-ms 60 --rounds 2 --no-check
PYTHONPATH=$after timeout 18 "$python" "$here/groups.py" "$out/groups.csv" 2>&1 | tee "$out/groups.log"
"$python" - "$out" <<'PY'
import json, sys
from statistics import geometric_mean
out = sys.argv[1]
def cells(name):
    return dict(enumerate(json.load(open(f"{out}/{name}.json"))["cells"]))
try:
    ratios = []
    for turn in (1, 2):
        before, after = cells(f"sm80_before_{turn}"), cells(f"sm80_after_{turn}")
        for key in before:
            a, b = before[key]["seconds"].get("sm80"), after.get(key, {}).get("seconds", {}).get("sm80")
            if a and b:
                ratios.append(a / b)
                print(turn, {k: v for k, v in before[key].items() if k in ("name", "mask", "length", "problem")}, f"after / before {a / b:.3f}")
    print(f"bwd_sm80, after / before: geometric mean {geometric_mean(ratios):.4f}, least {min(ratios):.3f}")
except Exception as error:  # the files are there all the same
    print("summary:", error)
PY
echo "$((SECONDS - start)) s after the build"
