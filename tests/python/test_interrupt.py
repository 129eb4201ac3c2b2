"""Ctrl-C during a long call: KeyboardInterrupt within a second, and the next call works; a process's end during one."""

import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
import tessera

SHAPE = (1, 32768, 4, 64)  # half a minute of work


def interrupt_after(seconds):
    thread = threading.Timer(seconds, signal.raise_signal, [signal.SIGINT])
    thread.start()
    return thread


def forward(q):
    tessera.attention(q, q, q)


def reference(q):
    tessera.attention(q, q, q, kernel="reference")


def backward(q):
    lse = np.zeros((q.shape[0], q.shape[2], q.shape[1]), np.float32)
    tessera.attention_backward(q, q, q, q, lse, q)


@pytest.mark.parametrize("call", [forward, reference, backward])
def test_ctrl_c_ends_a_call(call):
    q = np.zeros(SHAPE, np.float32)
    timer = interrupt_after(0.3)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        call(q)
    assert time.monotonic() - start < 1.3
    timer.join()
    call(q[:, :64])


def test_what_a_handler_raises_is_raised():
    class Told(Exception):
        pass

    def handler(number, frame):
        raise Told

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Told):
            forward(np.zeros(SHAPE, np.float32))
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_handler_that_raises_nothing_stops_nothing():
    seen = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: seen.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        q = np.zeros((1, 4096, 4, 64), np.float32)
        assert np.array_equal(tessera.attention(q, q, q), q)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert seen, "handlers run while a call computes"


def test_a_call_of_another_thread_goes_on():
    """Python runs handlers in its main thread: the others' calls are not theirs to end."""
    q = np.zeros((1, 4096, 4, 64), np.float32)
    results = []
    worker = threading.Thread(target=lambda: results.append(tessera.attention(q, q, q)))
    worker.start()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
        time.sleep(1)
    worker.join()
    assert np.array_equal(results[0], q)


def test_ctrl_c_under_torch():
    pytest.importorskip("torch")
    program = textwrap.dedent(f"""
        import signal, threading, time, torch, tessera.torch
        q = torch.zeros({SHAPE}, requires_grad=True)
        threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
        start = time.monotonic()
        try:
            tessera.torch.attention(q, q, q).sum().backward()
        except KeyboardInterrupt:
            print(time.monotonic() - start)
    """)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 1.3


CALLS = {
    "forward": "tessera.attention(q, q, q)",
    "backward": "tessera.attention_backward(q, q, q, q, np.zeros((1, 4, q.shape[1]), np.float32), q)",
    "combine": "tessera.combine(np.stack((q, q)), np.zeros((2, 1, 4, q.shape[1]), np.float32))",
    "many": "tessera.attention(q[:, :16], q[:, :16], q[:, :16])",
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_daemon_thread_in_a_call_leaves_quietly(call):
    """Before Python 3.14, a thread that acquires the GIL while the interpreter ends is unwound, through destructors."""
    program = textwrap.dedent(f"""
        import threading, time, numpy as np, tessera
        q = np.zeros((1, 3000, 4, 64), np.float32)
        def work():
            while True:
                {call}
        for _ in range(2):
            threading.Thread(target=work, daemon=True).start()
        time.sleep(0.2)
    """)
    for _ in range(2):
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert run.returncode == 0 and run.stderr == ""
