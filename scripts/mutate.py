"""Mutation testing (DeMillo, Lipton and Sayward, 1978): plants small faults in the product's sources, one at a time,
and reports those that no test finds.

    make mutate                                              100 faults over all areas, build/mutants/report_1.json
    mutate.py --area core --count 40 --seed 7 --jobs 4       some of them
    mutate.py --seconds 1200                                 those for which there is time; the same again goes on
    mutate.py --replay src/cpu/combine.cpp:31:2              one fault again: file, line, number of the line's mutant
    mutate.py --draw faults.json; mutate.py --faults faults.json      drawn here, tried on a machine without the rules

The faults are universalmutator's (its rules for C++): an operator or a constant replaced, a condition negated, a
statement removed. A fault that does not compile is replaced by another one. An area defines which files are mutated,
what is built, and which tests have to find the fault; they stop at the first failure. A survivor is either equivalent
to the original, which a person decides, or a case that the tests lack.

The unchanged tree is built once, with little optimisation, and runs every test once. Each fault then gets a copy of
that folder, which a mount namespace shows at the folder's own path, so that only what the fault reaches is compiled.
"""

import argparse
import concurrent.futures
import contextlib
import io
import itertools
import json
import os
import pathlib
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field

ROOT = pathlib.Path(__file__).resolve().parent.parent
RULES = ["universal.rules", "c_like.rules", "cpp.rules"]
BUILD_TIMEOUT_S = 1800
COMPILE_S, MOST_S = 60, 150  # of a header of the CPU's kernels, on a core; of nearly every fault

# Lines whose faults no test of results can find: descriptions, build options.
NOT_MUTATED = re.compile(r"^\s*(#|//|\*|static_assert|TESSERA_CONFIG_FIELDS|using |namespace |template|}|$)")
NOT_COPIED = shutil.ignore_patterns(".*", "build", "dist", "out", "__pycache__")


@dataclass(frozen=True)
class Stage:
    """What is built, and the commands to run then; {tests} and {root} are filled in, as is a shard's number."""

    targets: tuple
    commands: tuple


@dataclass(frozen=True)
class Area:
    sources: tuple  # globs
    stages: tuple


GTEST = "--gtest_fail_fast --gtest_brief=1"


def shards(program, count, environment=""):
    return tuple(
        f"env {environment} GTEST_TOTAL_SHARDS={count} GTEST_SHARD_INDEX={shard} {{tests}}/{program} {GTEST}"
        for shard in range(count)
    )


UNIT = Stage(("unit_tests",), shards("unit_tests", 4))
SCORE = Stage(("score_tests",), (f"{{tests}}/score_tests {GTEST}",))
RANKS = Stage(("ranks_op_tests",), shards("ranks_op_tests --gtest_filter=-*Nccl*", 2))
TEXT = Stage(("score_cuda_text_tests",), (f"{{tests}}/score_cuda_text_tests {GTEST}",))
OP = Stage(
    ("op_tests", "tessera_fuzz"),
    (
        *shards("op_tests --gtest_filter=-*Amx*:*Gpu*:*Cuda*", 8),
        "{tests}/tessera_fuzz --seed 1 --count 150",
    ),
)
AREAS = {
    "core": Area(("src/core/*.[ch]pp", "src/core/score/*.[ch]pp", "src/api/*.[ch]pp"), (UNIT, SCORE, OP, RANKS, TEXT)),
    "cpu": Area(
        tuple(f"src/cpu/{name}.[ch]pp" for name in ("[!a]*", "a[!m]*", "score/[!a]*", "score/a[!m]*")),
        (OP, UNIT, SCORE),
    ),
    # With the library whose tiles are plain C++, on every machine.
    "amx": Area(
        ("src/cpu/amx_*.hpp", "src/cpu/score/amx_*.hpp"),
        (
            Stage(
                ("tessera_amx_emulated", "op_tests"),
                shards("op_tests --gtest_filter=*Amx*", 8, "LD_LIBRARY_PATH={tests}/amx_emulated"),
            ),
        ),
    ),
    "kernels": Area(
        ("kernels/tessera/[!p]*/*.cuh", "kernels/tessera/*/*/*.cuh", "kernels/tessera/*/*/*/*.cuh"),
        (
            Stage(
                ("cuda_device_code_tests", "op_tests", "emulated_driver", "emulated_nvrtc"),
                (f"{{tests}}/cuda_device_code_tests {GTEST}", "cases:tests/op/sanitizer_cases.txt"),
            ),
            Stage(("cuda_combine_tests",), (f"{{tests}}/cuda_combine_tests {GTEST}",)),
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
    outcome: str = ""  # found, survived, does not compile, unfinished
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


def part_of_a_type(code, mutant):
    """const T& x -> const T| x, f<2>() -> f>=2>(): binary operators have blanks on both sides here; brackets of
    templates, references and pointers have not."""
    at = len(os.path.commonprefix([code, mutant]))
    operators = set("<>&*")
    start = at if code[at : at + 1] in operators else at - 1
    if code[start : start + 1] not in operators:
        return False
    end = start
    while code[start - 1 : start] in operators:
        start -= 1
    while code[end : end + 1] in operators | {"="}:
        end += 1
    return code[start - 1 : start] != " " or code[end : end + 1] not in ("", " ")


TYPED_NAME = r"(const |constexpr |static |alignas\(\d+\) )*(?!return\b)[\w:]+(<.*>)?[&*]? \w+"
DECLARATION_LEFT_OUT = re.compile(rf"^\s*/\*{TYPED_NAME}(\[.*\])*( = .*|\{{.*\}}|\(.*\))?;\*/$")
NO_TOKEN = re.compile(r"[<>=]==|><|\d\.[(-]|[1-9]x[0-9a-f]|\d \(0==1\)|alignas\(-")
PARAMETERS_SWAPPED = re.compile(rf" \( *{TYPED_NAME},")


def never_compiles(code, mutant):
    if digit_of_a_name(code, mutant) or part_of_a_type(code, mutant):
        return True
    left = re.sub(r"/\*.*\*/", "", mutant)
    if any(code.count(a) - code.count(b) != left.count(a) - left.count(b) for a, b in ("{}", "()", "[]")):
        return True
    return any(pattern.search(mutant) for pattern in (DECLARATION_LEFT_OUT, PARAMETERS_SWAPPED, NO_TOKEN))


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
        if NOT_MUTATED.match(code) or mutant == code or "\n" in mutant:
            continue
        if never_compiles(code, mutant):
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


def commands(stage, part):
    """Of op_tests' shards one in `part`."""
    for number, command in enumerate(stage.commands):
        if "/op_tests" in command and number % part:
            continue
        if command.startswith("cases:"):
            for case in (ROOT / command[6:]).read_text().splitlines():
                if case and not case.startswith("#"):
                    yield ("{root}/scripts/emulated_gpu.sh", "{tests}/op_tests", "--backend", "cuda", "--case", case)
        else:
            yield tuple(command.split())


class Base:
    """The unchanged tree with its build, and the seconds that each command takes there."""

    def __init__(self, folder, deadline, part):
        self.root, self.build, self.deadline, self.part = folder, folder / "build" / "release", deadline, part
        self.seconds = {}
        self.stopped = threading.Event()
        self.running = set()  # processes, each the first of its group
        self.environment = os.environ | {
            "TESSERA_CACHE_DIR": str(folder / "build" / "cache"),
            "EMULATED_GPU": str(self.build / "tests" / "emulated_gpu"),
        }  # fmt: skip
        self.unshare = ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--mount"]

    def call(self, command, timeout, at=None):
        """Its status, -1 if it takes longer than `timeout` seconds, and what it wrote. At the deadline the event
        `stopped` is set. `at`: a copy of the folder that it sees at the folder's path."""
        command = [part.replace("{tests}", f"{self.build}/tests").replace("{root}", str(self.root)) for part in command]
        if at:
            show = 'mount --bind "$1" "$2" && cd "$2" && shift 2 && exec "$@"'
            command = [*self.unshare, "sh", "-c", show, "sh", str(at), str(self.root), *command]
        left = self.deadline - time.monotonic()
        with subprocess.Popen(command, cwd=self.root, env=self.environment, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                              start_new_session=True) as process:  # fmt: skip
            self.running.add(process.pid)
            try:
                text = process.communicate(timeout=max(0, min(timeout, left)))[0]
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                if left <= timeout:
                    self.stopped.set()
                return -1, "time is up"
            finally:
                self.running.discard(process.pid)
        return process.returncode, text

    def stop(self):
        self.deadline = 0
        self.stopped.set()
        for pid in list(self.running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def compile(self, targets, jobs, at=None):
        return self.call(["cmake", "--build", str(self.build), "--parallel", str(jobs), "--target", *targets],
                         BUILD_TIMEOUT_S, at)  # fmt: skip

    def set_up(self, areas, jobs):
        """Builds, and runs every test once: what fails on this machine is left out, and a test's time limits its time
        with a fault."""
        for path in sorted(ROOT.iterdir()):
            if path.name in NOT_COPIED(None, [path.name]):
                continue
            if path.is_dir():
                shutil.copytree(path, self.root / path.name, ignore=NOT_COPIED, copy_function=copy_if_changed,
                                dirs_exist_ok=True)  # fmt: skip
            else:
                self.root.mkdir(parents=True, exist_ok=True)
                copy_if_changed(path, self.root / path.name)
        stages = [stage for area in areas for stage in AREAS[area].stages]
        for command in (
            ["cmake", "-S", ".", "-B", str(self.build), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
             "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -DNDEBUG", "-DTESSERA_QUICK_KERNELS=ON", "-DTESSERA_BUILD_CLI=OFF",
             "-DTESSERA_BUILD_EXAMPLES=OFF", "-DTESSERA_BUILD_BENCH=OFF", f"-DTESSERA_TEST_PYTHON={sys.executable}"],
            ["cmake", "--build", str(self.build), "--parallel", str(jobs), "--target",
             *sorted({target for stage in stages for target in stage.targets})],
        ):  # fmt: skip
            code, text = self.call(command, BUILD_TIMEOUT_S)
            if code:
                raise SystemExit(f"mutate.py: the unchanged tree does not build:\n{text[-3000:]}")

        def run_once(command):
            started = time.monotonic()
            code, text = self.call(command, BUILD_TIMEOUT_S)
            if code:
                print(f"left out: the unchanged tree fails {' '.join(command)}:\n{text[-3000:]}", flush=True)
            else:
                self.seconds[command] = time.monotonic() - started

        todo = dict.fromkeys(command for stage in stages for command in commands(stage, self.part))
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            list(pool.map(run_once, todo))

    def has_time_for(self, area):
        """Whether a fault that nothing finds would end in time: else the last ones counted were those soon found."""
        tests = sum(self.seconds.get(c, 0) for stage in AREAS[area].stages for c in commands(stage, self.part))
        return self.deadline - time.monotonic() > min(COMPILE_S + tests, MOST_S)

    def try_fault(self, fault, copy):
        started = time.monotonic()
        shutil.rmtree(copy, ignore_errors=True)
        subprocess.run(["cp", "-a", "--reflink=auto", str(self.root), str(copy)], check=True)
        path = copy / fault.path
        lines = path.read_text().splitlines(keepends=True)
        lines[fault.line - 1] = fault.after + "\n"
        path.write_text("".join(lines))
        self.run_stages(fault, copy)
        if self.stopped.is_set():
            fault.outcome = "unfinished"
        fault.seconds = round(time.monotonic() - started, 1)
        shutil.rmtree(copy, ignore_errors=True)
        return fault

    def run_stages(self, fault, copy):
        order = list(AREAS[fault.area].stages)
        if "/score/" in fault.path and SCORE in order:
            order.sort(key=lambda stage: stage is not SCORE)
        for stage in order:
            code, text = self.compile(stage.targets, 1, copy)
            if code:
                fault.outcome, fault.log = "does not compile", text.splitlines()[-4:]
                return
            for command in filter(self.seconds.__contains__, commands(stage, self.part)):
                code, text = self.call(command, 30 + 10 * self.seconds[command], copy)
                if code:
                    # Kernels are compiled when a case runs.
                    compiles = fault.area != "kernels" or "error:" not in text
                    fault.outcome = "found" if compiles else "does not compile"
                    program = next(part for part in command if part.startswith("{tests}/") and "=" not in part)
                    fault.by = command[-1] if "--case" in command else pathlib.Path(program).name
                    fault.log = text.splitlines()[-4:]
                    return
        fault.outcome = "survived"


def copy_if_changed(source, target):
    source, target = pathlib.Path(source), pathlib.Path(target)
    if not target.exists() or target.read_bytes() != source.read_bytes():
        shutil.copyfile(source, target)
        shutil.copymode(source, target)


def write_report(path, faults):
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps([asdict(f) for f in faults], indent=1) + "\n")
    partial.replace(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--area", action="append", choices=AREAS, help="core, cpu, amx or kernels; all unless given")
    parser.add_argument("--count", type=int, default=100, help="faults that compile (100)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="faults tried at once, a core each")
    parser.add_argument("--seconds", type=float, default=1e9, help="end after so long")
    parser.add_argument("--part", type=int, default=1, help="of the case table's shards one in PART: a quick look")
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "build" / "mutants")
    parser.add_argument(
        "--report", type=pathlib.Path, help="report_SEED.json in the folder; what it has is not tried again"
    )
    parser.add_argument("--replay", action="append", metavar="FILE:LINE:NUMBER")
    parser.add_argument("--draw", type=pathlib.Path, metavar="FILE", help="write COUNT faults and end")
    parser.add_argument("--faults", type=pathlib.Path, metavar="FILE", help="take the faults that --draw wrote")
    options = parser.parse_args()
    folder = options.folder.resolve()
    areas = options.area or list(AREAS)
    deadline = time.monotonic() + options.seconds

    if options.replay:
        faults = [named_fault(name) for name in options.replay]
    elif options.faults:
        faults = [Fault(**f) for f in json.loads(options.faults.read_text()) if f["area"] in areas]
    else:
        faults = faults_in_order(areas, options.seed)
    if options.draw:
        write_report(options.draw, list(itertools.islice(faults, options.count)))
        return
    if options.replay:
        areas, options.count = sorted({f.area for f in faults}), len(faults)
    report = options.report or folder / ("replay.json" if options.replay else f"report_{options.seed}.json")
    done = []
    if report.exists() and not options.replay:
        done = [f for f in map(lambda f: Fault(**f), json.loads(report.read_text())) if f.outcome != "unfinished"]
    known = {f.id for f in done}
    faults = (f for f in faults if f.id not in known)
    counted = sum(f.outcome != "does not compile" for f in done)

    base = Base(folder / "base", deadline, options.part)

    def interrupted(number, _):
        base.stop()
        raise SystemExit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupted)
    started = time.monotonic()
    base.set_up(areas, options.jobs)
    print(f"the unchanged tree was built and passes: {time.monotonic() - started:.0f} s", flush=True)
    idle = queue.Queue()
    for n in range(options.jobs):
        idle.put(folder / f"copy_{n}")

    def try_next(fault):
        copy = idle.get()
        try:
            return base.try_fault(fault, copy)
        finally:
            idle.put(copy)

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        running = set()
        while True:
            while len(running) < options.jobs and counted + len(running) < options.count:
                in_time = {area for area in areas if base.has_time_for(area)}
                fault = next((f for f in faults if f.area in in_time), None) if in_time else None
                if fault is None:
                    break
                running.add(pool.submit(try_next, fault))
            if not running:
                break
            finished, running = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for fault in (f.result() for f in finished):
                done.append(fault)
                counted += fault.outcome in ("found", "survived")
                print(f"{fault.outcome:17} {fault.id:50} {fault.seconds:6.1f} s  {fault.by}", flush=True)
            write_report(report, done)

    survivors = [f for f in done if f.outcome == "survived"]
    for fault in survivors:
        print(f"\nsurvived: {fault.id}\n  - {fault.before}\n  + {fault.after}")
    print()
    for area in areas:
        tried = [f for f in done if f.area == area and f.outcome in ("found", "survived")]
        print(f"{area:8} {sum(f.outcome == 'found' for f in tried)} of {len(tried)} faults were found")
    print(f"{counted - len(survivors)} of {counted} faults were found; {report}")


if __name__ == "__main__":
    main()
