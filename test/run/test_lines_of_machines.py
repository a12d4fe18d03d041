"""The lines of --hosts as two agents on this machine: as the run on one."""

import shlex
import socket
import sys

import numpy as np
import pytest
from support.device import on_cpu
from support.ranks import sample
from support.ranks.nodes import Nodes, states

pytest.importorskip("torch")

import shardir
from shardir.tools import run as tool


@on_cpu("a command does not compute there unless it is told to")
def test_the_lines_of_two_machines(tmp_path, capsys, monkeypatch):
    directory = sample.write(tmp_path / "a program")
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        rdzv = f"127.0.0.1:{free.getsockname()[1]}"
    given = ["a program", "--steps=6", "--dump=a dump.npz", "--timeout=60"]
    assert tool.main([*given, "--hosts=127.0.0.1,localhost", f"--rdzv={rdzv}"]) == 0
    lines = [x for x in capsys.readouterr().out.splitlines() if not x.startswith("# on ")]
    nodes = Nodes()
    for rank, line in enumerate(lines):
        cd, folder, _, python, *run = shlex.split(line)
        assert (cd, folder, python) == ("cd", str(tmp_path), sys.executable)
        assert run[:2] == ["-m", "shardir.tools.run"]
        nodes.start_line(rank, run[2:])
    ended = nodes.end()
    assert [code for code, _ in ended.values()] == [0, 0], ended
    expected = tmp_path / "one.npz"
    shardir.run(directory, steps=6, dump=expected, timeout=60)
    found, one = states(tmp_path / "a dump.npz"), states(expected)
    assert found.keys() == one.keys()
    assert all(np.array_equal(found[key], x) for key, x in one.items())
