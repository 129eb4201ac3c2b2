"""tessera run and the file system: links, modes, pipes, several results in one file, and file contents that could
affect a terminal."""

import contextlib
import io
import json
import os
import stat
import struct
import subprocess
import threading
import time

import numpy as np
import pytest

SHAPES = {"q": (1, 8, 4, 16), "k": (1, 8, 2, 16), "v": (1, 8, 2, 16)}
INPUTS = ("run", "q.npy", "k.npy", "v.npy")


@pytest.fixture
def good(folder, random):
    folder.save(**{name: random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()})
    folder.inputs = folder.files()
    return folder


@pytest.fixture
def expected(good):
    """o and lse, by the plainest way to have them."""
    good.succeeds(*INPUTS, "-o", "plain_o.npy", "--lse", "plain_lse.npy")
    results = good.load("plain_o"), good.load("plain_lse")
    for name in ("plain_o.npy", "plain_lse.npy"):
        (good.path / name).unlink()
    return results


def refused(folder, *arguments, code=2):
    before = folder.files()
    outcome = folder.tessera(*arguments)
    assert outcome.code == code and outcome.out == "" and len(outcome.error_lines) == 1, outcome.err
    assert folder.files() == before
    return outcome.err


def program(folder, *arguments, **options):
    return subprocess.run(
        [os.environ["TESSERA_PROGRAM"], *map(str, arguments)], cwd=folder.path, timeout=300, capture_output=True,
        **options,
    )  # fmt: skip


def read_safetensors(path):
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    body = data[8 + length :]
    assert max(entry["data_offsets"][1] for entry in header.values()) == len(body)
    return {
        name: np.frombuffer(body[slice(*entry["data_offsets"])], "<f4").reshape(entry["shape"])
        for name, entry in header.items()
    }


# ---- several results -------------------------------------------------------------------------------------------------


def test_results_share_a_safetensors_file(good, expected):
    good.succeeds(*INPUTS, "-o", "x.safetensors:o", "--lse", "./x.safetensors:lse")
    held = read_safetensors(good.path / "x.safetensors")
    assert list(held) == ["lse", "o"] or list(held) == ["o", "lse"]
    for name, array in zip(("o", "lse"), expected):
        np.testing.assert_array_equal(held[name], array)


@pytest.mark.parametrize(
    "first, second",
    (
        ("same.npy", "same.npy"),
        ("same.npy", "./same.npy"),
        ("same.npy", "folder/../same.npy"),
        ("same.npy", "link.npy"),
        ("dangling.npy", "nowhere.npy"),
        ("hard.npy", "twin.npy"),
        ("x.safetensors:o", "x.safetensors:o"),
        ("x.safetensors:o", "folder/../x.safetensors:o"),
        ("x.safetensors:lse", "x.safetensors"),  # the default name
        ("x.safetensors", "as.npy"),  # a link to it
    ),
)
def test_two_results_in_one_place(good, first, second):
    (good.path / "folder").mkdir()
    for link, target in (("link.npy", "same.npy"), ("dangling.npy", "nowhere.npy"), ("as.npy", "x.safetensors")):
        (good.path / link).symlink_to(target)
    (good.path / "hard.npy").write_bytes(b"before")
    os.link(good.path / "hard.npy", good.path / "twin.npy")
    message = refused(good, *INPUTS, "-o", first, "--lse", second)
    assert f"--lse {second}: is also what --out names" in message
    assert (good.path / "hard.npy").read_bytes() == b"before"


@pytest.mark.parametrize("name", ("", "x.safetensors:", "x.safetensors:__metadata__", "x.safetensors:a\x1bb"))
def test_names_that_are_none(good, name):
    assert "--out" in refused(good, *INPUTS, "-o", name)


@pytest.mark.parametrize("flag", ("--bias", "--lse", "--grad"))
def test_empty_name(good, flag):
    assert flag in refused(good, *INPUTS, "-o", "out.npy", flag, "")


# ---- existing files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", (0o600, 0o640, 0o664, 0o755))
def test_mode_of_what_is_replaced(good, expected, mode):
    target = good.path / "out.npy"
    target.write_bytes(b"before")
    target.chmod(mode)
    good.succeeds(*INPUTS, "-o", "out.npy")
    assert stat.S_IMODE(target.stat().st_mode) == mode
    np.testing.assert_array_equal(good.load("out"), expected[0])
    assert good.files() == good.inputs | {"out.npy"}


def test_mode_of_a_new_file(good):
    program(good, *INPUTS, "-o", "out.npy", umask=0o027)
    assert stat.S_IMODE((good.path / "out.npy").stat().st_mode) == 0o640


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_owner_of_what_is_replaced(good):
    target = good.path / "out.npy"
    target.write_bytes(b"before")
    os.chown(target, 12345, 23456)
    good.succeeds(*INPUTS, "-o", "out.npy")
    assert (target.stat().st_uid, target.stat().st_gid) == (12345, 23456)


@pytest.mark.parametrize("before", (None, b"before"))
def test_links_are_followed(good, expected, before):
    (good.path / "there").mkdir()
    (good.path / "one.npy").symlink_to("two.npy")
    (good.path / "two.npy").symlink_to(good.path / "there" / "target.npy")
    if before is not None:
        (good.path / "there" / "target.npy").write_bytes(before)
    good.succeeds(*INPUTS, "-o", "one.npy")
    assert (good.path / "one.npy").is_symlink() and (good.path / "two.npy").is_symlink()
    np.testing.assert_array_equal(np.load(good.path / "there" / "target.npy"), expected[0])
    assert os.listdir(good.path / "there") == ["target.npy"]


@pytest.mark.parametrize("target", ("nowhere/out.npy", "loop.npy", "folder"))
def test_links_that_lead_nowhere(good, target):
    (good.path / "folder").mkdir()
    (good.path / "loop.npy").symlink_to("link.npy")
    (good.path / "link.npy").symlink_to(target)
    assert "--out link.npy" in refused(good, *INPUTS, "-o", "link.npy")


def test_read_only_file(good):
    target = good.path / "out.npy"
    target.write_bytes(b"before")
    target.chmod(0o444)
    assert "--out out.npy" in (message := refused(good, *INPUTS, "-o", "out.npy")) and "read-only" in message
    assert target.read_bytes() == b"before"


def test_failure_leaves_nothing(good):
    """A check that fails is an answer; a result that cannot be written is a failure, and no other one appears."""
    reader, writer = os.pipe()
    os.close(reader)
    outcome = program(good, *INPUTS, "-o", "out.npy", "--lse", f"/dev/fd/{writer}", pass_fds=(writer,))
    os.close(writer)
    assert outcome.returncode == 1 and outcome.stdout == b"" and b"--lse /dev/fd/" in outcome.stderr
    assert good.files() == good.inputs


def test_full_disk(good):
    assert "--out /dev/full" in refused(good, *INPUTS, "-o", "/dev/full", "--lse", "lse.npy", code=1)


def open_files(process):
    """os.stat of the files that a process has open beside its standard streams; it may close one in between."""
    for descriptor in os.listdir(f"/proc/{process}/fd"):
        if int(descriptor) > 2:
            with contextlib.suppress(FileNotFoundError):
                yield os.stat(f"/proc/{process}/fd/{descriptor}")


def test_killed_while_writing(good):
    """The named pipe has no reader: the program waits there, when o is written and not in its place."""
    os.mkfifo(good.path / "pipe.npy")
    before = good.files()
    process = subprocess.Popen(
        [os.environ["TESSERA_PROGRAM"], *INPUTS, "-o", "out.npy", "--lse", "pipe.npy"], cwd=good.path
    )
    written = 128 + 8 * 4 * 16 * 4
    for _ in range(1000):
        if any(stat.S_ISREG(facts.st_mode) and facts.st_size == written for facts in open_files(process.pid)):
            break
        time.sleep(0.01)
    else:
        pytest.fail("o was not written in ten seconds")
    named = good.files() - before
    process.kill()
    process.wait()
    if named:
        pytest.skip("this file system has no files without names")
    assert good.files() == before


# ---- pipes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", ((), ("--json",), ("--check",)))
def test_standard_output_holds_the_tensor_alone(good, expected, more):
    outcome = program(good, *INPUTS, "-o", "/dev/stdout", *more)
    assert outcome.returncode == 0, outcome.stderr
    stream = io.BytesIO(outcome.stdout)
    np.testing.assert_array_equal(np.load(stream), expected[0])
    assert stream.read() == b""
    if "--json" in more:
        assert json.loads(outcome.stderr)["outputs"][0]["file"] == "/dev/stdout"
    else:
        assert b"/dev/stdout" in outcome.stderr
    assert good.files() == good.inputs


@pytest.mark.parametrize("flags", (os.O_TRUNC, os.O_APPEND))
def test_standard_output_that_is_a_file(good, expected, flags):
    """Text written before and after is kept: the shell's { ...; tessera ...; } > file."""
    target = good.path / "out"
    target.write_bytes(b"")
    descriptor = os.open(target, os.O_WRONLY | flags)
    os.write(descriptor, b"before")
    outcome = subprocess.run(
        [os.environ["TESSERA_PROGRAM"], *INPUTS, "-o", "/dev/stdout"], cwd=good.path, stdout=descriptor,
        stderr=subprocess.PIPE, timeout=300,
    )  # fmt: skip
    os.write(descriptor, b"after")
    os.close(descriptor)
    held = target.read_bytes()
    assert outcome.returncode == 0 and held.startswith(b"before") and held.endswith(b"after")
    np.testing.assert_array_equal(np.load(io.BytesIO(held[6:-5])), expected[0])


def test_output_into_a_named_pipe(good, expected):
    os.mkfifo(good.path / "pipe.npy")
    received = []
    reader = threading.Thread(target=lambda: received.append((good.path / "pipe.npy").read_bytes()))
    reader.start()
    outcome = good.succeeds(*INPUTS, "-o", "pipe.npy")
    reader.join()
    np.testing.assert_array_equal(np.load(io.BytesIO(received[0])), expected[0])
    assert "pipe.npy" in outcome.out and good.files() == good.inputs | {"pipe.npy"}


def test_input_through_a_pipe(good, expected):
    whole = (good.path / "k.npy").read_bytes()
    arguments = ("run", "q.npy", "/dev/stdin", "v.npy", "-o", "out.npy")
    assert program(good, *arguments, input=whole).returncode == 0
    np.testing.assert_array_equal(good.load("out"), expected[0])
    (good.path / "out.npy").unlink()
    for wrong, word in ((whole[:-1], b"cut off"), (whole + b"x", b"too long"), (b"", b"cut off"), (bytes(99), b"not")):
        outcome = program(good, *arguments, input=wrong)
        assert outcome.returncode == 2 and outcome.stderr.startswith(b"tessera: k /dev/stdin: ")
        assert word in outcome.stderr and good.files() == good.inputs


def test_safetensors_through_a_pipe(good):
    os.mkfifo(good.path / "m.safetensors")
    descriptor = os.open(good.path / "m.safetensors", os.O_RDWR)  # a writer, so that opening does not wait
    message = refused(good, "run", "m.safetensors", "k.npy", "v.npy", "-o", "out.npy")
    os.close(descriptor)
    assert "q m.safetensors: is a pipe" in message


# ---- what files hold -------------------------------------------------------------------------------------------------

HOSTILE = "\x1b[31mred\x07\x00\x9b2J\u202eend\x7f\n"
ENTRY = {"dtype": "F32", "shape": [1, 8, 4, 16], "data_offsets": [0, 2048]}


def safetensors(header, data=bytes(2048)):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "header",
    ({HOSTILE: ENTRY}, {"q": {**ENTRY, "dtype": HOSTILE}}, {"q": {**ENTRY, "shape": [HOSTILE]}}),
    ids=("name", "dtype", "shape"),
)
def test_escape_sequences_in_safetensors(good, header):
    (good.path / "m.safetensors").write_bytes(safetensors(header))
    message = refused(good, "run", "m.safetensors", "k.npy", "v.npy", "-o", "out.npy")
    assert all(character.isprintable() for character in message.rstrip("\n")), ascii(message)
    assert "red" in message and "end" in message  # a NUL ends nothing


def test_escape_sequences_in_npy(good):
    header = "{'descr': '\x1b[31mred\x00end\xff', 'fortran_order': False, 'shape': (1,), }".encode("latin1")
    (good.path / "q.npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + b"1234")
    message = refused(good, *INPUTS, "-o", "out.npy")
    assert r"\x1b[31mred\x00end\xff" in message and "\x1b" not in message


def test_escape_sequences_in_file_names(good):
    name = "\x1b[31mred.npy"
    outcome = good.succeeds(*INPUTS, "-o", name)
    assert r"\x1b[31mred.npy" in outcome.out and "\x1b" not in outcome.out
    (good.path / name).write_bytes(b"no array")
    assert "\x1b" not in refused(good, "run", name, "k.npy", "v.npy", "-o", "out.npy")
    assert "\x1b" not in refused(good, "\x1b[31mred")


def test_names_in_other_scripts_stay(good):
    assert "ключи ε 鍵.npy" in good.succeeds(*INPUTS, "-o", "ключи ε 鍵.npy").out


@pytest.mark.parametrize(
    "entry",
    (
        '{"dtype": "F32", "shape": [1.0, 8, 4, 16], "data_offsets": [0, 2048]}',
        '{"dtype": "F32", "shape": [1.5, 8, 4, 16], "data_offsets": [0, 2048]}',
        '{"dtype": "F32", "shape": [1e0, 8, 4, 16], "data_offsets": [0, 2048]}',
        '{"dtype": "F32", "shape": [-1, 8, 4, 16], "data_offsets": [0, 2048]}',
        '{"dtype": "F32", "shape": [true, 8, 4, 16], "data_offsets": [0, 2048]}',
        '{"dtype": "F32", "shape": ["1", 8, 4, 16], "data_offsets": [0, 2048]}',
        '{"dtype": "F32", "shape": [18446744073709551617, 8, 4, 16], "data_offsets": [0, 2048]}',
        '{"dtype": "F32", "shape": [9223372036854775809, 8, 4, 16], "data_offsets": [0, 2048]}',
        '{"dtype": "F32", "shape": {"0": 1}, "data_offsets": [0, 2048]}',
        '{"dtype": "F32", "shape": [1, 8, 4, 16], "data_offsets": [0.0, 2048]}',
        '{"dtype": "F32", "shape": [1, 8, 4, 16], "data_offsets": [0, 2.048e3]}',
        '{"dtype": "F32", "shape": [1, 8, 4, 16], "data_offsets": [false, 2048]}',
        '{"dtype": "F32", "shape": [1, 8, 4, 16], "shape": [1, 8, 4, 16], "data_offsets": [0, 2048]}',
        '{"dtype": "F32", "shape": [1, 8, 4, 16], "data_offsets": [0, 2048]}, "q": {"dtype": "F32"}',
    ),
)
def test_numbers_that_are_no_extents(good, entry):
    right = b'{"q": {"dtype": "F32", "shape": [1, 8, 4, 16], "data_offsets": [0, 2048]}}'
    (good.path / "m.safetensors").write_bytes(safetensors(right))
    good.succeeds("run", "m.safetensors", "k.npy", "v.npy", "-o", "out.npy")
    (good.path / "m.safetensors").write_bytes(safetensors(f'{{"q": {entry}}}'.encode()))
    assert "q m.safetensors" in refused(good, "run", "m.safetensors", "k.npy", "v.npy", "-o", "out.npy")


def test_npy_header_that_says_something_twice(good):
    whole = (good.path / "q.npy").read_bytes()
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1, 8, 4, 16), 'shape': (1, 4, 8, 16), }"
    (good.path / "q.npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + whole[128:])
    assert "q q.npy" in refused(good, *INPUTS, "-o", "out.npy")
