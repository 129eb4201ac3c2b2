#!/usr/bin/env bash
# Block masks, long contexts, dropout and masks, GPT-2 medium: README.md beside this file. Run in the root of the tree. Results in $OUT.
set -uo pipefail
out=${OUT:?}
log() { echo "== $* ($SECONDS s)"; }
# Builds: the tests, the Python module, and two variants of it.
cmake -S . -B build/gpu -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DTESSERA_BUILD_CLI=OFF -DTESSERA_BUILD_BENCH=OFF \
  > "$out/build.log" 2>&1 && cmake --build build/gpu --parallel 16 --target op_tests >> "$out/build.log" 2>&1
path=$(scripts/gpu_python.sh --quiet) || exit 1
variant() {  # name, then sed's words and a file by turns: the tree changed so, built beside it
  local folder; folder=$(mktemp -d)/$1; shift
  cp -r . "$folder" && (cd "$folder" && rm -rf build/gpu && while (($#)); do sed -i "$1" "$2" || exit 1; shift 2; done && scripts/gpu_python.sh --quiet)
}
hidden='s/if (!list_hides(entry, consumer) || /if (true || !list_hides(entry, consumer) || /'
two='s/row.consumers > most_consumers) continue;/row.consumers > std::min(2, most_consumers)) continue;/'
alone='s/return block_mask \&\& !deterministic \&\& !score.any()/return false \&\& block_mask \&\& !deterministic \&\& !score.any()/'
first='s/const bool long_first = /const bool long_first = false \&\& /'
before=$(variant before "$first" kernels/tessera/fwd_sm90/producers.cuh "$hidden" kernels/tessera/fwd_sm90/kv_cursor.cuh "$two" src/cuda/families/fwd_sm90.cpp "$alone" kernels/tessera/bwd_sm90/config.hpp) || before=
skips=$(variant two "$two" src/cuda/families/fwd_sm90.cpp) || skips=
log built
begun=$SECONDS
left() { echo $((150 - SECONDS + begun)); }
part() {  # seconds, name, command
  local limit=$1 name=$2; shift 2
  (($(left) > 3)) || { log "$name: no time"; return; }
  ((limit < $(left))) || limit=$(left)
  log "$name"; timeout "$limit" "$@" > "$out/$name.log" 2>&1; echo "$name: exit status $?"; tail -25 "$out/$name.log"
}
export PYTHONPATH=$path PYTHONUNBUFFERED=1
python3 - > "$out/cases.txt" <<'P'
import re
text = open("tests/op/table_hopper.cpp").read()
for name, backward in (("kHopperBlocks", 0), ("kHopperBackward", 1)):
    start = text.index(f"constexpr const char* {name}[]")
    body = re.sub(r"//.*", "", text[text.index("{", start) : text.index("};", start)])
    for item in re.finditer(r'((?:"[^"]*"\s*)+),', body):
        case = "".join(re.findall(r'"([^"]*)"', item.group(1)))
        if "block_mask" in case:
            for dtype in ("bf16", "f16"):
                print(f"dtype={dtype} backward={backward} {case}")
P
split -n r/12 "$out/cases.txt" "$out/cases."
proof() { local failed=0 p; for p in "$out"/cases.a*; do build/gpu/tests/op_tests --backend cuda --cases "$p" & done; for p in $(jobs -p); do wait "$p" || failed=1; done; return $failed; }
export -f proof; export out
part 25 proof bash -c proof
part 25 sparse-64 python3 bench/block_sparse.py --block 64 --csv "$out/sparse-64.csv"
part 25 sparse-128 python3 bench/block_sparse.py --block 128 --csv "$out/sparse-128.csv"
for name in before two; do
  other=$([[ $name == before ]] && echo "$before" || echo "$skips")
  [[ -n $other ]] || { log "variant $name was not built"; continue; }
  for block in 64 128; do
    [[ $name$block == two128 ]] && continue
    PYTHONPATH=$other part 8 "variant-$name-$block" python3 bench/block_sparse.py --no-flex --block $block --csv "$out/variant-$name-$block.csv"
  done
done
part 8 again-64 python3 bench/block_sparse.py --no-flex --block 64 --csv "$out/again-64.csv"
part 40 long python3 bench/long_context.py --lengths 16384 262144 1048576 --lead 0 --samples 256 --csv "$out/long.csv"
part 20 speed python3 - <<'P'
import sys
sys.argv = ["papers.py"]
sys.path.insert(0, "bench")
import papers
rows = []
for head_dim in (64, 128):
    for more in ({"dropout": 0.1}, {"mask": True}, {"causal": True, "dropout": 0.1}):
        rows += papers.measure(papers.Setting(8, 2048 // head_dim, 2048, head_dim, **more), ("tessera", "standard", "eager"))
    import os
    papers.write(rows, os.environ["out"] + "/speed-options.csv")
P
part 35 gpt2 python3 bench/gpt2.py --settings medium,1024,16,0 medium,1024,16,0.1 --attention sdpa tessera --steps 12 --csv "$out/gpt2.csv"
part 20 memcheck compute-sanitizer --tool memcheck build/gpu/tests/op_tests --backend cuda --case 'dtype=bf16 backward=1 block_mask=hqk block_q=64 block_k=64 b=2 sq=200 sk=1800 hq=2 hkv=1 d=128 dv=128 cores=3'
log "$((SECONDS - begun)) s of GPU"
