#!/bin/bash
# Builds, checks and times the forms beside the library's kernels of this tree, cuDNN and, where its wheels are installed, FlashAttention-4: run.sh screen2 | screen3 | grid | late OUT.
# FINAL=1 FA4=1 LEAD=200 MS=200 run.sh grid OUT is the grid of docs/lab/bwd-forms.md (it timed the forms that select_best.py kept of the screening before it);
# CLK=200000 python3 run.py trace_cfgs trace "" prints the trace (after build.py trace_cfgs, in a copy of the folder, since its names are the others').
cd "$(dirname "$0")" || exit 1
export OUT=${2:-/tmp} LIB=${LIB:-/tmp/bwd_forms_library}
bash ../bwd_sm90/build.sh "$LIB" d64_a22 d128_a22
python3 build.py "$1" && python3 run.py "$1"
