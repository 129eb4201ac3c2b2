"""Shared by the searches of tiles: the library's tables, ptxas's report, forcing the library to one tile, checking
results."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import os
import re
import subprocess
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import nvrtc

ROOT = Path(__file__).resolve().parent.parent
FLOAT16, BFLOAT16 = 1, 2  # tessera::Dtype

# ---- data from the library ----


@lru_cache
def _program() -> str:
    given = os.environ.get("TESSERA_TILES")
    built = sorted(ROOT.glob("build/*/src/tessera_tiles"), key=lambda path: -path.stat().st_mtime)
    if not given and not built:
        raise SystemExit(
            "tessera_tiles: not built; cmake --build build/release --target tessera_tiles, or TESSERA_TILES=FILE"
        )
    return given or str(built[0])


def ask(*arguments: str, text: str = "") -> str:
    """Output of tessera_tiles."""
    return subprocess.run([_program(), *arguments], input=text, check=True, capture_output=True, text=True).stdout


@lru_cache
def tables() -> dict:
    """The output of tessera_tiles by kernel family."""
    return json.loads(ask())


def config_text(config: str, fields: list[str], values: dict) -> str:
    """A config as its kernel's template argument; `fields` are the library's, in order."""
    unknown = [name for name in fields if name not in values]
    if unknown:
        raise SystemExit(f"{', '.join(unknown)}: a field of {config} that this script has no value for")
    return f"tessera::{config}{{{', '.join(f'.{name} = {values[name]}' for name in fields)}}}"


# ---- compile ----

# ptxas's messages if products wait for each other, or if setmaxnreg is ignored.
LOSSES = ("wgmma.mma_async instructions are serialized", "warpgroup.wait is injected", "'setmaxnreg' ignored")


@dataclass(frozen=True)
class Report:
    registers: int
    spill_bytes: int  # stored and loaded
    loss: str  # of LOSSES
    failure: str = ""

    def __str__(self) -> str:
        return "" if self.failure else f"{self.registers}, {self.spill_bytes}"

    def reason(self, most_spill_bytes: int) -> str:
        """Why the tile is not worth measuring, or "" if it is."""
        if self.failure:
            return f"does not compile: {self.failure}"
        return self.loss or ("spills" if self.spill_bytes > most_spill_bytes else "")


def read_log(log: str, status: int) -> Report:
    if status != 0:
        error = re.search(r"error.*", log)
        return Report(0, 0, "", error.group(0) if error else "no reason given")
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    loss = next((words for words in LOSSES if words in log), "")
    return Report(int(registers.group(1)) if registers else 0, sum(map(int, spills)), loss)


def compile_source(source: str) -> Report:
    """By NVRTC on this tree's headers, for compute capability 9.0. Needs no GPU and no library."""
    options = ["--gpu-architecture=sm_90a", "-std=c++20", "-default-device", "--ptxas-options=-v",
               f"--include-path={ROOT / 'kernels'}"]  # fmt: skip
    _, log, status = nvrtc.compile_program(source, options)
    return read_log(log, status)


def compile_jobs(compile_tile: Callable, jobs: list[tuple]) -> list[Report | None]:
    """compile_tile(*job) of each job; None if there is no NVRTC."""
    if nvrtc.library() is None:
        print("NVRTC: not found, so nothing is known of registers, spills and serialised wgmma")
        return [None for _ in jobs]
    # Processes: NVRTC compiles one kernel at a time in each. They may be forked before the GPU is first used.
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        return pool.starmap(compile_tile, jobs, chunksize=1)


# ---- measure ----


def make_forced(kernel: str, variable: str, direction: str, problem, inputs, tile, number: int):
    """Tessera with one tile, given as text in the environment's `variable`. The package keeps plans by problem: a scale
    that differs in the 40th bit gives each tile its own plan."""
    from cuda_bench.contestants import Tessera

    def hold() -> None:
        os.environ[variable] = tile.text

    class Forced(Tessera):
        def options(self) -> dict:
            return {**super().options(), "scale": problem.head_dim**-0.5 * (1 + number * 2.0**-40)}

        def plan(self) -> dict:
            hold()
            return super().plan()

        def forward(self):
            return self._held(super().forward)

        def backward(self):
            return self._held(super().backward)

        def _held(self, make: Callable):
            hold()
            call, results = make()

            def forced():
                hold()
                return call()

            return forced, results

    Forced.kernel = kernel
    return Forced(problem, inputs, direction)


def contestant_call(contestant) -> tuple[Callable, Callable]:
    return getattr(contestant, contestant.direction)()


def right_calls(
    problem, inputs, direction: str, error_bound: float, forced: Callable, tiles: list
) -> tuple[dict, dict, dict]:
    """cuDNN's call ({} if there is none), those of the correct tiles, and why the others are dropped. forced(tile,
    number) makes a tile's contestant; a result is correct if its error is at most `error_bound` times cuDNN's."""
    import torch

    from cuda_bench.contestants import Cudnn, NotOffered
    from cuda_bench.exact import Exact

    exact = Exact(problem, inputs, direction)
    peer, calls, dropped = {}, {}, {}
    bound = error_bound * torch.finfo(torch.bfloat16).eps
    try:
        call, results = contestant_call(Cudnn(problem, inputs, direction))
        bound = error_bound * exact.error(results(call()))
        peer["cudnn"] = call
    except (NotOffered, RuntimeError) as error:
        dropped["cudnn"] = str(error).splitlines()[0]
    for number, tile in enumerate(tiles):
        try:
            call, results = contestant_call(forced(tile, number))
            error = exact.error(results(call()))
        except (RuntimeError, ValueError) as failure:  # the library's error
            dropped[tile] = str(failure).splitlines()[0]
            continue
        if error <= bound:
            calls[tile] = call
        else:
            dropped[tile] = f"relative RMS error {error:.1e}, at most {bound:.1e}"
    return peer, calls, dropped


def rates(problem, direction: str, calls: dict, steadiness) -> dict:
    """TFLOP/s of each."""
    from cuda_bench import timing

    timed = timing.contest(calls, steadiness)
    return {name: problem.flops(direction) / result.seconds * 1e-12 for name, result in timed.items()}


def texts_of(cell: dict) -> str:
    return "; ".join(f"{getattr(name, 'text', name)} {rate:.0f}" for name, rate in cell.items())


def say_dropped(where: str, dropped: dict) -> None:
    for name, reason in dropped.items():
        print(f"{where}: {getattr(name, 'text', name)} dropped: {reason}")


def fill_cache(warm: Callable, jobs: list[tuple], processes: int) -> None:
    """warm(job) of each job, in separate processes: each compiles a tile into the library's cache."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(processes, os.cpu_count() or 1), mp_context=spawn) as pool:
        failures = [future.exception() for future in [pool.submit(warm, job) for job in jobs]]
    for (row, tile), failure in zip(jobs, failures):
        if failure:
            print(f"{row.name} {tile.text}: {failure}")


# ---- the table ----


def length_text(length: int, rate: float, peer: float | None) -> str:
    """For a row's comment: "512: 200 (0.50)", with the ratio to cuDNN."""
    return f"{length}: {rate:.0f}" + (f" ({rate / peer:.2f})" if peer else "")


def read_blocks(text: str, key_of: Callable[[list[str]], Hashable]) -> dict:
    """The rows of each key, which is made of a row's fields, and the comments above them; the heading ends with an
    empty line."""
    blocks: dict = {}
    comments: list[str] = []
    for line in text.partition("\n\n")[2].splitlines():
        if not line.startswith("{"):
            comments.append(line)
            continue
        blocks.setdefault(key_of([part.strip() for part in line[1:].split(",")]), []).extend([*comments, line])
        comments = []
    return blocks


def provenance(facts: dict) -> str:
    return (
        f"{facts['gpu']}, driver {facts['driver']}, cuDNN {facts['cudnn']}, commit {facts['commit']}, {facts['date']}"
    )
