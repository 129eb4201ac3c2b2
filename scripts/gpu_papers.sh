#!/usr/bin/env bash
# Measures the claims of the papers on a machine with a GPU. Writes one CSV per subject to $OUT, otherwise to
# build/gpu-python/logs. Takes three to four minutes on an H200 with 16 cores; bench/papers.py and bench/long_context.py
# document the subjects.
#
#   scripts/gpu_papers.sh [SUBJECT ...]    speed, blocks, traffic (ncu), lengths, long, gpt2, sparse, pathfinder;
#                                          default: all but the last
#
# gpt2 needs Transformers. sparse is bench/block_sparse.py, with blocks of 128 and of 64. pathfinder trains for
# $TRAIN_SECONDS (480) in out/pathfinder: 32 x 32 until that is learnt, then from its weights 64 x 64, then 128 x 128 up
# to 0.8, then 256 x 256; another call continues where the last one stopped.
#
# The committed results are bench/results/<date>-<gpu>-papers-<subject>.csv, which `make docs` draws.
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
logs=${OUT:-$PWD/build/gpu-python/logs}
all=(speed blocks traffic lengths long gpt2 sparse pathfinder)
subjects=("$@")
((${#subjects[@]})) || subjects=("${all[@]::7}")
for subject in "${subjects[@]}"; do
  [[ " ${all[*]} " == *" $subject "* ]] || { echo "$subject: no such subject; accepted ${all[*]}" >&2; exit 2; }
done

mkdir -p "$logs"
path=$(scripts/gpu_python.sh --quiet) || exit 1
export PYTHONPATH=$path PYTHONUNBUFFERED=1

run_speed() { "$python" bench/papers.py speed --csv "$logs/speed.csv"; }
run_blocks() { "$python" bench/papers.py blocks --csv "$logs/blocks.csv"; }
# The hardware's own count of bytes to and from memory.
run_traffic() {
  ncu --csv --page raw --print-units base --profile-from-start off \
    --metrics dram__bytes_read.sum,dram__bytes_write.sum,gpu__time_duration.sum \
    "$python" bench/papers.py traffic > "$logs/ncu.csv" 2> "$logs/ncu.log" &&
    "$python" bench/papers.py counted "$logs/ncu.csv" --csv "$logs/traffic.csv"
}
run_lengths() {
  "$python" bench/papers.py lengths --lengths 1024 4096 16384 32768 65536 131072 262144 --csv "$logs/lengths.csv"
}
run_long() { "$python" bench/long_context.py --csv "$logs/long.csv"; }
run_gpt2() { "$python" bench/gpt2.py --csv "$logs/gpt2.csv"; }
run_sparse() {
  "$python" bench/block_sparse.py --csv "$logs/sparse.csv" &&
    "$python" bench/block_sparse.py --block 64 --csv "$logs/sparse-64.csv"
}
run_pathfinder() {
  local folder=${PATHFINDER:-out/pathfinder} end=$((SECONDS + ${TRAIN_SECONDS:-480})) side before= more
  for side in 32 64 128 256; do
    if [[ -f $folder/$((2 * side))/checkpoint.pt ]]; then
      before=$side
      continue
    fi
    ((SECONDS < end)) || return 0
    case $side in
      32) more=(--steps 12000 --report 200 --until 0.9) ;;
      64) more=(--steps 12000 --report 200 --until 0.9 --rate 5e-4) ;;
      128) more=(--steps 20000 --report 100 --until 0.8 --rate 3e-4 --batch 16 --warmup 100 --held-out 500) ;;
      *) more=(--steps 20000 --report 100 --rate 3e-4 --batch 8 --warmup 100 --held-out 400 --near 20) ;;
    esac
    if [[ -f $folder/$side/checkpoint.pt ]]; then
      more+=(--resume)
    elif [[ -n $before ]]; then
      more+=(--init "$folder/$before/checkpoint.pt")
    fi
    "$python" examples/pathfinder/train.py --side $side --folder "$folder/$side" --workers "${JOBS:-4}" "${more[@]}" \
      --minutes "$(awk "BEGIN { print ($end - $SECONDS) / 60 }")" || return
    cp "$folder/$side/curve.csv" "$logs/pathfinder-$side.csv"
    before=$side
  done
}

failed=0
for subject in "${subjects[@]}"; do
  started=$SECONDS
  echo "== $subject"
  if "run_$subject"; then
    echo "$subject: done ($((SECONDS - started)) s)"
  else
    echo "$subject: FAILED ($((SECONDS - started)) s)"
    failed=$((failed + 1))
  fi
done
exit $((failed > 0))
