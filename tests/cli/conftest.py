"""Runs the built program as a user would. Its path is in the environment variable TESSERA_PROGRAM."""

import fcntl
import os
import pty
import struct
import subprocess
import termios
import threading
from pathlib import Path

import numpy as np
import pytest

os.environ["TESSERA_PROGRAM"] = str(Path(os.environ["TESSERA_PROGRAM"]).resolve())  # it runs in other folders


class Outcome:
    def __init__(self, process):
        self.code = process.returncode
        self.out = process.stdout
        self.err = process.stderr

    @property
    def error_lines(self):
        return self.err.splitlines()


class Folder:
    """A temporary folder with the user's files, in which the program runs."""

    def __init__(self, path: Path):
        self.path = path

    def save(self, **arrays):
        for name, array in arrays.items():
            np.save(self.path / f"{name}.npy", array)

    def load(self, name):
        return np.load(self.path / f"{name}.npy")

    def files(self):
        return {entry.name for entry in self.path.iterdir()}

    def tessera(self, *arguments, **environment):
        process = subprocess.run(
            [os.environ["TESSERA_PROGRAM"], *map(str, arguments)],
            cwd=self.path,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=300,
        )
        return Outcome(process)

    def on_terminal(self, columns, *arguments):
        """The program's output on a terminal with this number of columns."""
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 40, columns, 0, 0))
        shown = bytearray()

        def read():
            try:
                while data := os.read(ours, 4096):
                    shown.extend(data)
            except OSError:  # the other side is closed
                pass

        reader = threading.Thread(target=read)
        reader.start()
        process = subprocess.run(
            [os.environ["TESSERA_PROGRAM"], *map(str, arguments)], cwd=self.path, stdout=theirs, stderr=theirs,
            timeout=300,
        )  # fmt: skip
        os.close(theirs)
        reader.join()
        os.close(ours)
        assert process.returncode == 0, shown.decode()
        return shown.decode().replace("\r\n", "\n")

    def succeeds(self, *arguments, **environment):
        outcome = self.tessera(*arguments, **environment)
        assert outcome.code == 0, outcome.err or outcome.out
        return outcome


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


@pytest.fixture
def random():
    return np.random.default_rng(7)
