#!/usr/bin/env python3
"""PyTorch's own tests of FlexAttention, run with Tessera in FlexAttention's place.

    PYTHONPATH=SITE python scripts/check_flex_attention.py [--tests FOLDER] [--json FILE] [PYTEST OPTIONS]

SITE has this repository's wheel (scripts/build_wheel.sh). PyTorch, pytest and expecttest are installed. The tests are
those of the commit that the installed PyTorch was built from: they are downloaded into a temporary folder, or FOLDER
has them. They run on the CPU, and where there is a GPU, on it, after `tessera.torch.activate_flex_attention()`. What
follows goes to pytest: `-k captured`, `-x`.

Tests are counted by what came of them, with the number of Tessera's calls while they ran. A test that passed without a
call says nothing of Tessera, nor does one that failed and asserts something of PyTorch's own kernels: its source reads
generated code, graphs, warnings or counters of the compiler. The exit status is 1 if another test failed, or Tessera
refused what the test computes; not for an error in other words than PyTorch's, nor where PyTorch has one and Tessera
computes (an LSE compiled on the CPU): these are listed to be read.
"""

from __future__ import annotations

import argparse
import collections
import inspect
import json
import re
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import NamedTuple

FILES = ("test_flex_attention.py", "test_flex_decoding.py")
ADDRESS = "https://raw.githubusercontent.com/pytorch/pytorch/{commit}/test/inductor/{file}"
# What a test uses that asserts something of PyTorch's compiler.
INTERNALS = (
    "run_and_get_code", "run_fw_bw_and_get_code", "FileCheck", "normalize_gm", "assertExpectedInline",
    "EagerAndRecordGraphs", "AotEagerAndRecordGraphs", "metrics.", "counters[", "max_autotune", "flex_attention_hop",
    "flex_attention_fwd", "higher_order.flex_attention", "make_fx", "TritonTemplateKernel", "_WARNINGS_SHOWN",
)  # fmt: skip
OF_INTERNALS = "failed, of PyTorch's kernels alone"
PASSED = "passed, Tessera called"
NOT_CALLED = "passed, Tessera not called"
SKIPPED = "skipped"
EXPECTED = "failed, as PyTorch expects"
OTHER_WORDS = "refused, in other words"
ACCEPTED = "accepted, where PyTorch refuses"
REFUSED = "refused by Tessera alone"
FAILED = "failed"
KINDS = (PASSED, NOT_CALLED, SKIPPED, EXPECTED, OF_INTERNALS, OTHER_WORDS, ACCEPTED, REFUSED, FAILED)


class Result(NamedTuple):
    test: str
    kind: str
    forward: int  # calls of Tessera while it ran
    backward: int
    why: str  # of a skip or failure, in one line


def obtain(commit: str, folder: Path) -> None:
    for file in FILES:
        address = ADDRESS.format(commit=commit, file=file)
        try:
            with urllib.request.urlopen(address, timeout=60) as answer:
                (folder / file).write_bytes(answer.read())
        except OSError as error:
            sys.exit(f"{address}: {error}; accepted with --tests FOLDER, which has {' and '.join(FILES)}")


def one_line(text: str) -> str:
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    return lines[0][:200] if lines else ""


def of_internals(function) -> bool:
    try:
        source = inspect.getsource(inspect.unwrap(getattr(function, "__func__", function)))
    except (OSError, TypeError):
        return False
    return any(name in source for name in INTERNALS)


def chain(error: BaseException | None) -> list[BaseException]:
    """An error, and those that it was raised from or while they were handled."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def kind_of_failure(error: BaseException, refusal: type, internals: bool) -> str:
    """`refusal`: Tessera's error. Within torch.compile it is the text of PyTorch's error."""
    if internals:
        return OF_INTERNALS
    if isinstance(error, AssertionError) and " not raised" in str(error):
        return ACCEPTED
    errors = chain(error)
    if not any(isinstance(one, refusal) or "tessera" in f"{type(one).__module__} {one}" for one in errors):
        return FAILED
    # assertRaisesRegex fails with its own error, or lets an error of another type pass.
    return OTHER_WORDS if expects_an_error(errors[0]) else REFUSED


def expects_an_error(error: BaseException) -> bool:
    if isinstance(error, AssertionError) and re.search(r'^"?.*"? does not match ', str(error), re.S):
        return True
    trace = error.__traceback__
    while trace is not None:
        lines, first = frame_source(trace.tb_frame)
        before = lines[: trace.tb_lineno - first + 1]
        if any("assertRaises" in line for line in before[-8:]):
            return True
        trace = trace.tb_next
    return False


def frame_source(frame) -> tuple[list[str], int]:
    if Path(frame.f_code.co_filename).name not in FILES:
        return [], 0
    try:
        return inspect.getsourcelines(frame.f_code)
    except OSError:
        return [], 0


class Recorder:
    """A plug-in of pytest: what came of each test, and how often Tessera was called."""

    def __init__(self) -> None:
        from tessera import Error
        from tessera.torch import kernels

        self.results: list[Result] = []
        self.calls = collections.Counter()
        self.before = collections.Counter()
        self.refusal = Error
        self.reports: dict[str, tuple[str, str]] = {}
        for direction in ("forward", "backward"):
            setattr(kernels, direction, self.counted(direction, getattr(kernels, direction)))

    def counted(self, direction: str, function):
        def call(*arguments, **options):
            found = function(*arguments, **options)
            self.calls[direction] += 1
            return found

        return call

    def pytest_runtest_setup(self, item) -> None:
        self.before = self.calls.copy()

    def pytest_runtest_makereport(self, item, call) -> None:
        import pytest

        name = item.nodeid.rpartition("/")[2]
        if call.excinfo is None:
            if call.when == "call":
                called = self.calls != self.before
                self.add(name, PASSED if called else NOT_CALLED, "")
            return
        error = call.excinfo.value
        if isinstance(error, pytest.skip.Exception) or type(error).__name__ == "SkipTest":
            self.add(name, SKIPPED, one_line(error))
        elif getattr(inspect.unwrap(item.obj), "__unittest_expecting_failure__", False):
            self.add(name, EXPECTED, one_line(error))
        else:
            self.add(name, kind_of_failure(error, self.refusal, of_internals(item.obj)), one_line(error))

    def add(self, name: str, kind: str, why: str) -> None:
        made = self.calls - self.before
        self.results.append(Result(name, kind, made["forward"], made["backward"], why))


def report(results: list[Result]) -> str:
    lines = []
    for kind in KINDS:
        of_kind = [result for result in results if result.kind == kind]
        calls = sum(r.forward for r in of_kind), sum(r.backward for r in of_kind)
        lines.append(f"{len(of_kind):6} {kind}: {calls[0]} forward and {calls[1]} backward calls of Tessera")
        reasons = collections.Counter(result.why for result in of_kind if result.why)
        if kind in (ACCEPTED, REFUSED, FAILED):
            lines += [f"       {result.test}: {result.why}" for result in of_kind]
        else:
            lines += [f"       {count} x {why}" for why, count in reasons.most_common()]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path, metavar="FOLDER", help="a folder with " + " and ".join(FILES))
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes each test's result")
    given, options = parser.parse_known_args()
    if given.tests and not any((given.tests / file).exists() for file in FILES):
        sys.exit(f"--tests {given.tests}: accepted a folder with {' or '.join(FILES)}")

    import pytest
    import torch
    import torch.nn.attention.flex_attention

    import tessera.torch

    tessera.torch.activate_flex_attention()  # the tests then import Tessera's
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.tests or Path(temporary)
        if given.tests is None:
            obtain(torch.version.git_version, folder)
        files = [str(folder / file) for file in FILES if (folder / file).exists()]
        print(f"PyTorch {torch.__version__}, commit {torch.version.git_version}: {', '.join(files)}", flush=True)
        quiet = ["-q", "-p", "no:cacheprovider", "--no-header", "--tb=no", "--disable-warnings"]
        pytest.main([*quiet, *options, *files], plugins=[recorder])
    if given.json:
        given.json.write_text(json.dumps([result._asdict() for result in recorder.results], indent=1) + "\n")
    print(report(recorder.results))
    return int(not recorder.results or any(result.kind in (REFUSED, FAILED) for result in recorder.results))


if __name__ == "__main__":
    sys.exit(main())
