#!/usr/bin/env bash
# Pathfinder at 128 x 128: README.md beside this file. Run in the root of the tree. Results in $OUT.
set -uo pipefail
out=${OUT:?}
path=$(scripts/gpu_python.sh --quiet) || exit 1
export PYTHONPATH=$path PYTHONUNBUFFERED=1
train=examples/pathfinder/train.py
# The held-out pictures, on the processor.
for what in "128 500" "256 200"; do
  python3 - $what "$out" <<'P'
import sys
sys.path.insert(0, "examples/pathfinder")
from pathlib import Path
import numpy as np
import pathfinder
import train  # the seed
side, count, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]) / sys.argv[1]
folder.mkdir(parents=True, exist_ok=True)
images, labels = pathfinder.generate(side, count, train.HELD_OUT_SEED, 16)
np.savez_compressed(folder / f"held-out-{side}-{count}.npz", images=images, labels=labels)
P
done
begun=$SECONDS
timeout 250 python3 $train --side 128 --folder "$out/128" --init examples/pathfinder/weights-128.pt --steps 700 --rate 2e-4 --warmup 60 --batch 16 \
  --held-out 500 --report 140 --minutes 3.9 2>&1 | tee "$out/train-128.log"
cp "$out/128/curve.csv" "$out/curve-128.csv"; cp "$out/128/weights.pt" "$out/weights-128.pt"; cp "$out/128/checkpoint.pt" "$out/checkpoint-128.pt"
for near in 64 none; do
  left=$((298 - SECONDS + begun))
  ((left > 8)) || { echo "256, near $near: no time"; break; }
  echo "256 x 256, near $near, no training:"
  timeout $left python3 $train --side 256 --folder "$out/256" --init "$out/128/weights.pt" --steps 0 --batch 8 --held-out 200 \
    $([[ $near == none ]] || echo --near $near)
done 2>&1 | tee "$out/judged-256.log"
echo "$((SECONDS - begun)) s of GPU"
