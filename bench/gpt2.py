"""Training Transformers' GPT-2 with only its attention replaced (examples/gpt2/train.py): every setting of the papers'
page in one process on one GPU, one CSV of all steps.

    python bench/gpt2.py --csv FILE [--settings small,4096,8,0 medium,1024,16,0.1 ...] [--steps 25]

A setting is model, length, batch, dropout; `compiled` as a fifth word: torch.compile and AdamW in one kernel, which
compiles each attention's model for a minute and more. On a GPU with less than 100 GB, batches that do not fit eager
attention are halved if eager attention is run.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

import torch

_spec = importlib.util.spec_from_file_location(
    "gpt2_train", Path(__file__).resolve().parents[1] / "examples/gpt2/train.py"
)
train = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(train)

SETTINGS = tuple(
    f"{model},{length},{batch},{dropout}"
    for dropout in (0, 0.1)
    for model, length, batch in (("small", 1024, 32), ("small", 4096, 8), ("small", 16384, 2), ("medium", 1024, 16))
)


def options_of(setting, steps, halve):
    model, length, batch, dropout, *more = setting.split(",")
    if more not in ([], ["compiled"]):
        raise SystemExit(f"--settings: {setting}, accepted model,length,batch,dropout and compiled after it")
    batch = int(batch) // 2 if halve and int(length) > 1024 else int(batch)
    flags = ["--compile", "--fused"] if more else []
    return train.parse(
        [
            "--model", model, "--length", length, "--batch", str(batch), "--dropout", dropout, "--steps", str(steps),
            *flags,
        ]
    )  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=SETTINGS, metavar="SETTING")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--attention", nargs="+", choices=train.ATTENTIONS, default=list(train.ATTENTIONS))
    parser.add_argument("--csv", type=Path, required=True)
    options = parser.parse_args()
    halve = (
        "eager" in options.attention
        and torch.cuda.is_available()
        and torch.cuda.get_device_properties(0).total_memory < 100e9
    )
    rows = []
    for setting in options.settings:
        each = options_of(setting, options.steps, halve)
        each.attention = options.attention
        rows += train.compare(each)
        train.write(options.csv, rows)  # partial results, in case the time runs out
    return 0


if __name__ == "__main__":
    sys.exit(main())
