"""Mutation testing (DeMillo, Lipton and Sayward, 1978): plants small faults in the product's sources, one at a time,
and reports those that no test finds.

    make mutate                                              100 faults over all areas, build/mutants/report.json
    mutate.py --area core --count 40 --seed 7 --jobs 4       some of them
    mutate.py --replay src/cpu/combine.cpp:31:2              one fault again: file, line, number of the line's mutant

The faults are universalmutator's (its rules for C++): an operator or a constant replaced, a condition negated, a
statement removed. A fault that does not compile is replaced by another one. An area defines which files are mutated,
what is built, and which tests have to find the fault; they stop at the first failure. A survivor is either equivalent
to the original, which a person decides, or a case that the tests lack.
"""

import argparse
import concurrent.futures
import contextlib
import io
import json
import os
import pathlib
import queue
import random
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field

ROOT = pathlib.Path(__file__).resolve().parent.parent
RULES = ["universal.rules", "c_like.rules", "cpp.rules"]
TIMEOUT_S = 300  # of one test program: a fault that never ends counts as found

# Lines whose faults no test of results can find: descriptions, build options.
NOT_MUTATED = re.compile(r"^\s*(#|//|\*|static_assert|TESSERA_CONFIG_FIELDS|using |namespace |template|}|$)")


@dataclass(frozen=True)
class Area:
    sources: tuple  # globs
    targets: tuple
    tests: tuple  # commands; {build} and {root} are filled in; `cases:` runs a file of cases on the emulated GPU


CPU_TESTS = (
    "{build}/tests/unit_tests --gtest_fail_fast --gtest_brief=1",
    "{build}/tests/op_tests --gtest_fail_fast --gtest_brief=1 --gtest_filter=-*Amx*:*Gpu*:*Cuda*",
    "{build}/tests/tessera_fuzz --seed 1 --count 300 --seconds 60",
)
AREAS = {
    "core": Area(
        ("src/core/*.[ch]pp", "src/core/score/*.[ch]pp", "src/api/*.[ch]pp"),
        ("tessera", "unit_tests", "score_tests", "op_tests", "tessera_fuzz"),
        ("{build}/tests/score_tests --gtest_fail_fast --gtest_brief=1", *CPU_TESTS),
    ),
    "cpu": Area(
        ("src/cpu/[!a]*.[ch]pp", "src/cpu/a[!m]*.[ch]pp", "src/cpu/score/*.[ch]pp"),
        ("tessera", "unit_tests", "score_tests", "op_tests", "tessera_fuzz"),
        ("{build}/tests/score_tests --gtest_fail_fast --gtest_brief=1", *CPU_TESTS),
    ),
    # With the library whose tiles are plain C++, on every machine.
    "amx": Area(
        ("src/cpu/amx_*.hpp",),
        ("tessera_amx_emulated", "op_tests"),
        (
            "env LD_LIBRARY_PATH={build}/tests/amx_emulated "
            "{build}/tests/op_tests --gtest_fail_fast --gtest_brief=1 --gtest_filter=*Amx*",
        ),
    ),
    "kernels": Area(
        ("kernels/tessera/[!p]*/*.cuh", "kernels/tessera/*/*/*.cuh", "kernels/tessera/*/*/*/*.cuh"),
        ("tessera", "op_tests", "emulated_driver", "emulated_nvrtc", "cuda_device_code_tests"),
        (
            "{build}/tests/cuda_device_code_tests --gtest_fail_fast --gtest_brief=1",
            "cases:{root}/tests/op/sanitizer_cases.txt",
        ),
    ),
}


@dataclass
class Fault:
    area: str
    path: str
    line: int  # from 1
    number: int  # among the mutants of its line
    before: str
    after: str
    outcome: str = ""  # found, survived, does not compile
    by: str = ""
    seconds: float = 0.0
    log: list = field(default_factory=list)

    @property
    def id(self):
        return f"{self.path}:{self.line}:{self.number}"


def digit_of_a_name(code, mutant):
    """int64_t -> int63_t: the rules mistake the digits of a name for a number."""
    at = len(os.path.commonprefix([code, mutant]))
    return re.search(r"[A-Za-z_]\d*$", code[:at]) is not None and re.match(r"\d", code[at:]) is not None


def mutants_of(path):
    """(line, number, text) of every fault that the rules make of a file, without comments and declarations of names."""
    from universalmutator import mutator
    lines = (ROOT / path).read_text().splitlines(keepends=True)
    with contextlib.redirect_stdout(io.StringIO()):
        drawn = mutator.mutants_regexp(lines, ruleFiles=RULES, ignorePatterns=[])
    counts, mutants = {}, []
    for line, text, *_ in drawn:
        code = lines[line - 1].split("//")[0].rstrip()
        mutant = text.split("//")[0].rstrip()
        if NOT_MUTATED.match(code) or mutant == code or "\n" in mutant or digit_of_a_name(code, mutant):
            continue
        counts[line] = counts.get(line, 0) + 1
        mutants.append((line, counts[line], text))
    return lines, mutants


def faults_in_order(areas, seed):
    """An endless list of faults: areas alternate; a file is chosen by its length, then a random line and one of its
    mutants."""
    random_ = random.Random(seed)
    files = {
        name: sorted(str(p.relative_to(ROOT)) for glob in AREAS[name].sources for p in ROOT.glob(glob))
        for name in areas
    }
    lengths = {name: [len((ROOT / path).read_text().splitlines()) for path in files[name]] for name in areas}
    known, seen = {}, set()
    while True:
        for area in areas:
            path = random_.choices(files[area], lengths[area])[0]
            if path not in known:
                known[path] = mutants_of(path)
            lines, mutants = known[path]
            if not mutants:
                continue
            line = random_.choice(sorted({m[0] for m in mutants}))
            _, number, text = random_.choice([m for m in mutants if m[0] == line])
            if (path, line, number) not in seen:
                seen.add((path, line, number))
                yield Fault(area, path, line, number, lines[line - 1].strip(), text.strip())


def named_fault(name):
    path, line, number = name.rsplit(":", 2)
    area = next(a for a in AREAS for glob in AREAS[a].sources if (ROOT / path) in set(ROOT.glob(glob)))
    lines, mutants = mutants_of(path)
    text = next(m[2] for m in mutants if m[:2] == (int(line), int(number)))
    return Fault(area, path, int(line), int(number), lines[int(line) - 1].strip(), text.strip())


class Worker:
    """A copy of the tree with its own build, so that several faults are tried at once."""

    def __init__(self, folder, jobs):
        self.root, self.build, self.jobs = folder, folder / "build" / "release", jobs
        self.environment = os.environ | {
            "CCACHE_BASEDIR": str(folder), "CCACHE_NOHASHDIR": "1",
            "TESSERA_CACHE_DIR": str(folder / "build" / "cache"),
            "EMULATED_GPU": str(self.build / "tests" / "emulated_gpu"),
        }  # fmt: skip

    def set_up(self, targets):
        files = (
            subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
            .stdout.decode()
            .split("\0")
        )
        for name in filter(None, files):
            to = self.root / name
            to.parent.mkdir(parents=True, exist_ok=True)
            if not to.exists() or to.read_bytes() != (ROOT / name).read_bytes():
                shutil.copy2(ROOT / name, to)
        launcher = (
            ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache", "-DCMAKE_C_COMPILER_LAUNCHER=ccache"]
            if shutil.which("ccache")
            else []
        )
        self.call(["cmake", "--preset", "release", "-DTESSERA_BUILD_EXAMPLES=OFF", "-DTESSERA_BUILD_BENCH=OFF",
                   f"-DTESSERA_TEST_PYTHON={sys.executable}", *launcher], check=True)
        code, text = self.compile(targets)
        if code:
            raise SystemExit(f"mutate.py: the unchanged tree does not build:\n{text[-3000:]}")

    def call(self, command, timeout=1800, check=False):
        try:
            done = subprocess.run(
                command, cwd=self.root, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, timeout=timeout, text=True, errors="replace",
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return -1, "time is up"
        if check and done.returncode:
            raise SystemExit(f"mutate.py: {' '.join(command)}\n{done.stdout[-3000:]}")
        return done.returncode, done.stdout

    def compile(self, targets):
        return self.call(["cmake", "--build", str(self.build), "--parallel", str(self.jobs), "--target", *targets])

    def commands(self, area, seed):
        for test in AREAS[area].tests:
            test = test.format(build=self.build, root=self.root)
            if not test.startswith("cases:"):
                yield test.split()
                continue
            cases = [
                line for line in pathlib.Path(test[6:]).read_text().splitlines() if line and not line.startswith("#")
            ]
            random.Random(seed).shuffle(cases)
            for case in cases:
                yield [
                    str(self.root / "scripts/emulated_gpu.sh"), str(self.build / "tests/op_tests"), "--backend", "cuda",
                    "--case", case,
                ]  # fmt: skip

    def try_fault(self, fault):
        started = time.monotonic()
        path = self.root / fault.path
        original = path.read_text()
        lines = original.splitlines(keepends=True)
        lines[fault.line - 1] = fault.after + "\n"
        try:
            path.write_text("".join(lines))
            code, text = self.compile(AREAS[fault.area].targets)
            fault.outcome = "does not compile" if code else "survived"
            if not code:
                for command in self.commands(fault.area, fault.id):
                    code, text = self.call(command, TIMEOUT_S)
                    if code:
                        # Kernels are compiled when a case runs.
                        compiles = fault.area != "kernels" or "error:" not in text
                        fault.outcome = "found" if compiles else "does not compile"
                        fault.by = command[-1] if "--case" in command else pathlib.Path(command[-3]).name
                        fault.log = text.splitlines()[-4:]
                        break
        finally:
            path.write_text(original)
        fault.seconds = round(time.monotonic() - started, 1)
        return fault


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--area", action="append", choices=AREAS, help="core, cpu, amx or kernels; all unless given")
    parser.add_argument("--count", type=int, default=100, help="faults that compile (100)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="faults tried at once")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no fault after so long")
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "build" / "mutants")
    parser.add_argument("--report", type=pathlib.Path)
    parser.add_argument("--replay", action="append", metavar="FILE:LINE:NUMBER")
    options = parser.parse_args()
    areas = options.area or list(AREAS)
    report = options.report or options.folder / "report.json"
    deadline = time.monotonic() + 60 * options.minutes

    faults = [named_fault(name) for name in options.replay] if options.replay else faults_in_order(areas, options.seed)
    if options.replay:
        areas, options.count = sorted({f.area for f in faults}), len(faults)
        faults = iter(faults)
    jobs = min(options.jobs, options.count)
    workers = [Worker(options.folder / f"worker_{n}", max(1, (os.cpu_count() or 1) // jobs)) for n in range(jobs)]
    targets = sorted({target for area in areas for target in AREAS[area].targets})
    workers[0].jobs = os.cpu_count() or 1
    workers[0].set_up(targets)  # the others' objects then come from ccache
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda worker: worker.set_up(targets), workers[1:]))
    idle = queue.Queue()
    for worker in workers:
        idle.put(worker)

    def try_next(fault):
        worker = idle.get()
        try:
            return worker.try_fault(fault)
        finally:
            idle.put(worker)

    done, counted = [], 0
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        running = set()
        while True:
            while len(running) < jobs and counted + len(running) < options.count and time.monotonic() < deadline:
                fault = next(faults, None)
                if fault is None:
                    break
                running.add(pool.submit(try_next, fault))
            if not running:
                break
            finished, running = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for fault in (f.result() for f in finished):
                done.append(fault)
                counted += fault.outcome != "does not compile"
                print(f"{fault.outcome:17} {fault.id:50} {fault.seconds:6.1f} s  {fault.by}", flush=True)
                report.parent.mkdir(parents=True, exist_ok=True)
                report.write_text(json.dumps([asdict(f) for f in done], indent=1) + "\n")

    survivors = [f for f in done if f.outcome == "survived"]
    for fault in survivors:
        print(f"\nsurvived: {fault.id}\n  - {fault.before}\n  + {fault.after}")
    print()
    for area in areas:
        tried = [f for f in done if f.area == area and f.outcome != "does not compile"]
        print(f"{area:8} {sum(f.outcome == 'found' for f in tried)} of {len(tried)} faults were found")
    print(f"{counted - len(survivors)} of {counted} faults were found; {report}")


if __name__ == "__main__":
    main()
