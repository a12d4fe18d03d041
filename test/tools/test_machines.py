"""The commands of several machines: --hosts, --start, --slurm. ssh, srun and the command are
scripts here."""

import io
import os
import shlex
import subprocess
import time
from pathlib import Path

import pytest

from shardir.backend.torch.launch import machines
from shardir.tools import run as tool
from shardir.tools.machines import OWN, words_of

MATMUL = """dist.mesh @m <dp = 4>
func.func @f(%x: tensor<4x2xf32, #dist.layout<@m, [{dp}, {}]>> {train.input = #train.init<normal>}) -> tensor<4x2xf32> {
  %y = nn.relu %x : (tensor<4x2xf32, #dist.layout<@m, [{dp}, {}]>>) -> tensor<4x2xf32>
  func.return %y : tensor<4x2xf32>
}
"""  # noqa: E501 - the text of a program

UGLY = 'it\'s "$HOME" `x`\n*'
LINE = UGLY.replace("\n", " ")

NODE = """#!/bin/sh
printf '%s\\0' "$@" > "$RECORDS/$FAKE_HOST$SLURM_NODEID"
pwd > "$RECORDS/pwd"
case "$*" in *waits*) trap 'echo asked to end; exit 143' TERM; while :; do sleep 0.05; done;; esac
echo one; echo two >&2
case "$FAKE_HOST" in broken) exit 3;; esac
"""
SSH = """#!/bin/sh
case "$3" in gone) exit 255;; esac
FAKE_HOST=$3; export FAKE_HOST
exec sh -c "$4"
"""
SRUN = """#!/bin/sh
for k in $(seq 0 $((SLURM_NNODES - 1))); do SLURM_NODEID=$k "$@" & done
wait
"""
SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames node[1-2]" ] && printf 'node1\\nnode2\\n'
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of 4 ranks, in a folder with an odd name; scripts in place of the tools."""
    import shardir

    bin, records, here = tmp_path / "bin", tmp_path / "records", tmp_path / UGLY
    for folder in (bin, records, here):
        folder.mkdir()
    scripts = {"ssh": SSH, "srun": SRUN, "scontrol": SCONTROL, "node": NODE}
    for name, text in scripts.items():
        (bin / name).write_text(text)
        (bin / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("RECORDS", str(records))
    monkeypatch.setattr(tool, "program_words", lambda: ["node"])
    monkeypatch.chdir(here)
    shardir.compile(MATMUL, mode="semi_auto").save(here / "out")
    return records


def words(record: Path) -> list[str]:
    return record.read_text().split("\0")[:-1]


EXPECTED = ["out", "--steps=7", f"--data=x={LINE}.npy", "--data=y=b.npy", f"--log={UGLY}"]
GIVEN = [
    "out", "--steps", "7", "--data", f"x={LINE}.npy", "--data=y=b.npy", "--log", UGLY,
]  # fmt: skip


@pytest.mark.usefixtures("directory")
def test_lines_are_those_of_each_machine(capsys):
    assert tool.main([*GIVEN, "--hosts", "node1,me@node2"]) == 0
    (line, other) = capsys.readouterr().out.split("# on node1\n")[1].split("# on me@node2\n")
    for k, text in enumerate((line, other)):
        node = ["--nnodes=2", f"--node-rank={k}", "--rdzv=node1:29400"]
        assert shlex.split(text) == ["cd", os.getcwd(), "&&", "node", *EXPECTED, *node]


def test_machines_are_started(directory, capfd):
    """The others' output has their names."""
    assert tool.main([*GIVEN, "--hosts=a,b,c,broken", "--rdzv=a:1", "--start"]) == 3
    out = capfd.readouterr().out.splitlines()
    assert sorted(out) == sorted(f"{h}{x}" for h in ("", "b: ", "c: ", "broken: ")
                                 for x in ("one", "two"))  # fmt: skip
    for k, host in enumerate(("a", "b", "c", "broken")):
        node = ["--nnodes=4", f"--node-rank={k}", "--rdzv=a:1"]
        assert words(directory / host) == [*EXPECTED, *node]
    assert (directory / "pwd").read_text() == f"{os.getcwd()}\n"


def test_where_ssh_fails_the_others_are_asked_to_end(directory, capfd):
    given = ["out", "--dump=waits.npz", "--hosts=a,gone", "--start", "--timeout=20"]
    assert tool.main(given) == 1
    found = capfd.readouterr()
    assert found.err == "error: --start: ssh to gone failed; try `ssh gone true`\n"
    # Unless it had not begun to run: then the signal ends its shell.
    assert found.out in ("asked to end\n", "")


def test_a_signal_asks_all_to_end(directory, monkeypatch):
    """As Ctrl-C does, in the main thread."""
    out, begun = io.StringIO(), time.monotonic()
    lines = machines.lines_of(["a", "b"], ["node", "waits"], "2", None, last=True)

    def interrupted(_: object) -> dict[str, int]:
        while len(list(directory.glob("?"))) < 2:
            assert time.monotonic() - begun < 20
            time.sleep(0.02)
        raise KeyboardInterrupt

    monkeypatch.setattr(machines, "_codes", interrupted)
    time.sleep(0.1)
    with pytest.raises(KeyboardInterrupt):
        machines.start(lines, 20, out)
    assert sorted(out.getvalue().splitlines()) == ["asked to end", "b: asked to end"]


@pytest.mark.parametrize(
    ("given", "options", "nodes"),
    [
        ([], ["--cpus-per-task=2"], "2"),
        (["--backend=nccl"], ["--gpus-per-node=2", "--cpus-per-task=8"], "2"),
        (["--max-restarts=1", "--checkpoints=c"], ["--cpus-per-task=2", "--no-kill"], "1:2"),
    ],
)
def test_a_job_of_slurm(given, options, nodes, directory, capsys, monkeypatch):
    assert tool.main([*GIVEN, *given, f"--nnodes={nodes}", "--slurm"]) == 0
    job = capsys.readouterr().out
    found = [line.removeprefix("#SBATCH ") for line in job.splitlines() if "#SBATCH" in line]
    assert found == ["--job-name=shardir", "--nodes=2", "--ntasks-per-node=1", *options,
                     "--signal=TERM@120"]  # fmt: skip
    (directory / "job").write_text(job.replace("srun --no-kill --kill-on-bad-exit=0", "srun"))
    variables = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "1234567", "SLURM_NNODES": "2"}
    subprocess.run(["bash", directory / "job"], env=os.environ | variables, cwd="/", check=True)
    parser = tool.parser()
    expected = parser.parse_args([*EXPECTED, *given])
    for k in (0, 1):
        *same, nnodes, rdzv, rank = words(directory / str(k))
        assert (nnodes, rdzv, rank) == (
            f"--nnodes={nodes}",
            "--rdzv=node1:24567",
            f"--node-rank={k}",
        )
        assert parser.parse_args(same) == expected
    assert (directory / "pwd").read_text() == f"{os.getcwd()}\n"


def test_words_parse_to_what_was_given():
    parser = tool.parser()
    given = parser.parse_args([
        "out", "--steps=3", "--seed=-2", "--timeout", "1.5", "--allow-nan",
        "--resume=a b", "--check", "--import=a", "--import", "b", "--data", "x=a.npy,b.npy",
        "--max-shard-size=5GB", "--last=pad=mask", "--log-every=4", "--hosts=a,b", "--nnodes=2",
    ])  # fmt: skip
    again = parser.parse_args(words_of(parser, given, OWN))
    assert vars(again) == vars(given) | {"hosts": None, "nnodes": parser.get_default("nnodes")}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--hosts=a,-oProxyCommand=x"],
         "--hosts: expected names such as node1,me@node2, got '-oProxyCommand=x'"),
        (["--hosts=a,,b"], "--hosts: expected names such as node1,me@node2, got ''"),
        (["--hosts=a,b;x"], "--hosts: expected names such as node1,me@node2, got 'b;x'"),
        (["--hosts=a,b,a"], "--hosts: expected each machine once, got a,b,a"),
        (["--hosts=a,b,c"], "--nnodes: expected a divisor of 4, the ranks of mesh @m <dp = 4>"),
        (["--hosts=a,b", "--nnodes=4"], "--nnodes: expected 2, as --hosts has, got 4"),
        (["--hosts=a,b", "--node-rank=1"], "--hosts: expected no --node-rank, which it finds"),
        (["--slurm", "--rdzv=a:1"], "--slurm: expected no --rdzv, which it finds"),
        (["--slurm", "--hosts=a"], "--slurm: expected no --hosts, which Slurm chooses"),
        (["--start"], "--start: expected --hosts A,B, the machines"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("directory")
def test_machines_that_cannot_be(given, message, capsys):
    assert tool.main(["out", *given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")


def test_a_source_is_compiled_first(tmp_path, capsys):
    path = tmp_path / "f.ir"
    path.write_text(MATMUL)
    assert tool.main([str(path), "--slurm"]) == 2
    assert "--slurm: expected a directory that shard-opt wrote, got " in capsys.readouterr().err
