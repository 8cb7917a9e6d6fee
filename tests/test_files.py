"""Atomic writes: whole or not at all, and only over what is a file."""

import os
import stat
import threading
from pathlib import Path

import pytest

from moe_runtime.errors import InputError
from moe_runtime.files import make_folder, require_outputs, require_writable, write_atomically


def test_a_symbolic_link_stays_and_its_target_is_replaced(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)
    write_atomically(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_atomically(pipe, b"data")
    reader.join(10)
    assert read == [b"data"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_pipe_without_a_name_is_written_to():
    """What `--out /dev/stdout | less` and `--out >(gzip)` are."""
    read, write = os.pipe()
    path = Path(f"/dev/fd/{write}")
    require_writable(path)
    require_outputs({"--out": path}, {})
    write_atomically(path, b"data")
    os.close(write)
    with open(read, "rb") as pipe:
        assert pipe.read() == b"data"


@pytest.mark.parametrize("name", ["x" * 250, "y" * 255])
def test_long_names_that_exist_can_be_written(tmp_path, name):
    require_writable(tmp_path / name)
    write_atomically(tmp_path / name, b"data")
    assert os.listdir(tmp_path) == [name]


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs Linux's /proc")
def test_a_folder_that_takes_no_files_is_known_before_the_work():
    """As root every permission is granted, and the write fails all the same."""
    with pytest.raises(InputError, match="/proc/out.json: cannot be written"):
        require_writable(Path("/proc/out.json"))


def test_a_write_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(InputError, match="cannot be written"):
        write_atomically(tmp_path / ("x" * 256), b"data")
    with pytest.raises(InputError, match="cannot be written"):
        write_atomically(tmp_path / "missing" / "file", b"data")
    assert os.listdir(tmp_path) == []


def test_folders_are_made_or_refused_by_name(tmp_path):
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file: is a file, not a folder"):
        make_folder(tmp_path / "file")
    with pytest.raises(InputError, match="the folder cannot be made"):
        make_folder(tmp_path / "file" / "under")
    with pytest.raises(InputError, match="the folder cannot be made"):
        make_folder(tmp_path / ("x" * 300))
