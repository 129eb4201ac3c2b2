#!/usr/bin/env bash
# What the papers claim, measured on a machine with a GPU: a CSV a subject in $OUT, else in build/gpu-python/logs. Three to four minutes
# on an H200 with 16 cores; bench/papers.py and bench/long_context.py say what each is.
#
#   scripts/gpu_papers.sh [SUBJECT ...]    speed, blocks, traffic (ncu), lengths, long, gpt2; all unless some are named
#
# The committed ones are bench/results/<date>-<gpu>-papers-<subject>.csv, which `make docs` draws.
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
logs=${OUT:-$PWD/build/gpu-python/logs}
all=(speed blocks traffic lengths long gpt2)
subjects=("$@")
((${#subjects[@]})) || subjects=("${all[@]}")
for subject in "${subjects[@]}"; do
  [[ " ${all[*]} " == *" $subject "* ]] || { echo "$subject: no such subject; accepted ${all[*]}" >&2; exit 2; }
done

mkdir -p "$logs" build/gpu-python
if ! path=$(scripts/gpu_python.sh 2> build/gpu-python/build.log); then
  tail -20 build/gpu-python/build.log
  echo "the extension was not built: build/gpu-python/build.log"
  exit 1
fi
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
run_gpt2() {
  local status=0 length batch dropout
  for run in "1024 32 0" "4096 8 0" "4096 8 0.1" "16384 2 0"; do
    read -r length batch dropout <<< "$run"
    "$python" examples/gpt2/train.py --length "$length" --batch "$batch" --dropout "$dropout" --steps 40 \
      --csv "$logs/gpt2-$length-$dropout.csv" || status=1
  done
  return $status
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
