#!/usr/bin/env bash
# Serving, before and after: README.md beside this file. Run in the root of the tree. Results in $OUT; $BASE: an archive of the tree before.
set -uo pipefail
root=$PWD; out=${OUT:-$root/build/batches/serving}; mkdir -p "$out"
python=${PYTHON:-python3}; export JOBS=${JOBS:-16}

# ---- build (not counted) ----
base=$root/build/base; mkdir -p "$base"; tar xzf "${BASE:?}" -C "$base"
(cd "$base" && JOBS=8 scripts/gpu_python.sh --quiet > "$out/base_path" 2> "$out/base_build.log") & base_job=$!
after=$(JOBS=8 scripts/gpu_python.sh --quiet 2> "$out/build.log") || { tail -20 "$out/build.log"; exit 1; }
wait $base_job || tail -5 "$out/base_build.log"
before=$(cat "$out/base_path")
variants="d128_16x8x1_p_pdl d128_16x8x1_tma_p_pdl d128_16x8x1_tma_pdl d128_16x8x1_tma_id_pdl"
for tree in "$base" "$root"; do
  name=$([[ $tree == "$root" ]] && echo after || echo before)
  (cd "$tree" && JOBS=4 bash lab/decode_sm90/build.sh "$root/build/ab/$name" $variants) > "$out/ab_build_$name.log" 2>&1 &
done
[[ -f build/gpu/build.ninja ]] || cmake -S . -B build/gpu -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DTESSERA_BUILD_CLI=OFF -DTESSERA_BUILD_BENCH=OFF > "$out/op_build.log" 2>&1
cmake --build build/gpu --parallel "$JOBS" --target op_tests ptx_tests >> "$out/op_build.log" 2>&1 || tail -5 "$out/op_build.log"
wait
echo "built after $SECONDS s"; start=$SECONDS
tests=$(find build/gpu -name op_tests -type f | head -1) ptx=$(find build/gpu -name ptx_tests -type f | head -1)

# ---- right? 75 s ----
timeout 12 "$ptx" --gtest_filter='*cp_async*' > "$out/ptx.log" 2>&1; tail -2 "$out/ptx.log"
timeout 40 "$tests" --gtest_filter='*Append*:CudaGpu/Combine.*' > "$out/append_combine.log" 2>&1 & right=$!
sed -nE '/^constexpr const char\* k(Decode|Mixed|Prefixes)\[\]/,/^};/s/^ *"(.*)",$/dtype=bf16 \1/p' tests/op/table.cpp | grep ' b=' > "$out/table.cases"
cat >> "$out/table.cases" <<'CASES'
dtype=bf16 b=5 few=4 sq=32 sk=3000 hq=32 hkv=8 d=128 dv=128 k=paged page=16 causal=1 q=packed
dtype=f16 b=4 few=3 sq=32 sk=5000 hq=32 hkv=8 d=128 dv=128 k=paged page=1 causal=1 q=packed
dtype=bf16 b=2 sq=30 sk=2000 hq=32 hkv=8 d=128 dv=128 k=paged page=1 causal=1
dtype=bf16 b=3 sq=1 sk=1000 hq=32 hkv=8 d=128 dv=128 k=paged page=3 invariant=1
dtype=f16 b=2 sq=2 sk=700 hq=4 hkv=2 d=100 dv=108 gap=4
CASES
split -n r/10 -d --additional-suffix=.cases "$out/table.cases" "$out/part."
ls "$out"/part.*.cases | timeout 60 xargs -P 10 -I{} sh -c "'$tests' --cases {} --backend cuda > {}.log 2>&1"
cat "$out"/part.*.log > "$out/table.log"; rm -f "$out"/part.*
wait $right; tail -2 "$out/append_combine.log"
echo "table: $(grep -c '^passed: ' "$out/table.log") of $(wc -l < "$out/table.cases") right; $(grep -m3 '^FAILED: ' "$out/table.log"); $((SECONDS - start)) s"

# ---- times ----
bench() { # NAME PATH SECONDS CASES... -- PATTERN
  local name=$1 path=$2 seconds=$3 pattern=${!#}; shift 3
  PYTHONPATH=$path PYTHONUNBUFFERED=1 timeout $((seconds + 8)) "$python" bench/cuda_serving.py --cases "${@:1:$#-1}" --only "$pattern" --rounds 3 --span-ms 6 \
    --seconds "$seconds" --out "$out/$name" > "$out/$name.log" 2>&1
  echo "== $name"; grep -E '^(decode|mixed|prefix|append|few|FAILED|WRONG)' "$out/$name.log"
}
# Before and after in turns, the same cells.
for turn in 1 2; do
  for version in before after; do
    bench "${version}_$turn" "$([[ $version == after ]] && echo "$after" || echo "$before")" 15 append prefix mixed '^append|^prefix|4 x 65536|16 x 32768 '
  done
done
SECONDS_LEFT=18 timeout 24 "$python" lab/decode_sm90/ab.py "$out/ab.jsonl" build/ab/before build/ab/after 2>&1 | tee "$out/ab.log" | tail -40
bench decode "$after" 35 decode few '^decode (32/8|64/8) (1 x (1024|2048|4096|8192|65536)|8 x|64 x)|^decode 32/32 1 x (1024|2048|8192)$|^few 32/8 (1|4) x'
PYTHONPATH=$after timeout 22 "$python" lab/serving/parts.py --csv "$out/parts.csv" > "$out/parts.log" 2>&1; tail -3 "$out/parts.log"; cat "$out/parts.csv"
"$python" bench/cuda_serving.py --summary "$out/decode/cells.json"
echo "$((SECONDS - start)) s after the build"
