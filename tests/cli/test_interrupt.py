"""Ctrl-C while the program computes: it ends within a second, by the signal, and leaves no file behind."""

import os
import signal
import subprocess
import time

import numpy as np
import pytest

LENGTH = 32768  # half a minute of work


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("flags", [(), ("--kernel", "reference"), ("--grad", "q.npy", "--dq", "dq.npy")])
def test_a_signal_ends_a_long_call(folder, number, flags):
    folder.save(q=np.zeros((1, LENGTH, 4, 64), np.float32))
    before = folder.files()
    process = subprocess.Popen(
        [os.environ["TESSERA_PROGRAM"], "run", "q.npy", "q.npy", "q.npy", "-o", "out.npy", *flags],
        cwd=folder.path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    # Until the files are read and it computes.
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(number)
    start = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - start < 1
    assert process.returncode == -number
    assert (out, err) == (b"", b"")
    assert folder.files() == before


def test_an_ignored_signal_stays_ignored(folder):
    folder.save(q=np.zeros((1, 4096, 4, 64), np.float32))
    process = subprocess.Popen(
        [os.environ["TESSERA_PROGRAM"], "run", "q.npy", "q.npy", "q.npy", "-o", "out.npy"],
        cwd=folder.path,
        stdout=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert folder.load("out").shape == (1, 4096, 4, 64)
