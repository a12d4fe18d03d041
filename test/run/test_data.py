# ruff: noqa: E402 (torch may not be installed)
"""The data of runs: files of every kind, packed tokens, each rank's part, batches ahead of use."""

import itertools
import json
import os
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
from support.extent import extent
from support.ranks import orders

torch = pytest.importorskip("torch")

from shardir.backend.torch.shardir_runtime import runtime as rt
from shardir.backend.torch.shardir_runtime.data import files
from shardir.backend.torch.shardir_runtime.data.files import PAGE, ArrayReader
from shardir.backend.torch.shardir_runtime.data.inputs import AHEAD, Inputs
from shardir.backend.torch.shardir_runtime.plan.arrays import ArrayError, array_in, sequences
from shardir.backend.torch.shardir_runtime.plan.program import (
    PlanArgument,
    PlanError,
    PlanFunction,
    ProgramPlan,
)
from shardir.backend.torch.shardir_runtime.run.states import States

NUMBERS = np.arange(84).reshape(12, 7)
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2",
          "I8": "|i1", "U8": "|u1", "U16": "<u2", "U32": "<u4", "BOOL": "|b1"}  # fmt: skip


def safetensors(path, **arrays):
    """Write a file as its format says, without the library."""
    names, header, at = {np.dtype(d).str: n for n, d in DTYPES.items()}, {}, 0
    for name, x in arrays.items():
        end = at + x.nbytes
        header[name] = {"dtype": names[x.dtype.str], "shape": x.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    parts = [x.tobytes() for x in arrays.values()]
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))
    return path


def read(array):
    return ArrayReader(array).read([(0, n) for n in array.shape])


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_every_kind_of_file_has_the_numbers_of_numpy(dtype, tmp_path):
    x = (NUMBERS * 641).astype(dtype)  # beyond the positive ones of i16
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "x.npz", other=x[:3], x=x)
    paths = [tmp_path / "x.npy", tmp_path / "x.npz"]
    paths.append(safetensors(tmp_path / "x.safetensors", other=x[:3], x=x))
    for path in paths:
        found = read(array_in(path, "x"))
        assert found.tolist() == x.tolist()
    if x.dtype.kind in "iu" and dtype != "|i1":
        x.tofile(tmp_path / "x.bin")
        name = x.dtype.kind + str(8 * x.dtype.itemsize)
        assert read(array_in(tmp_path / "x.bin", name)).tolist() == x.flatten().tolist()


@pytest.mark.parametrize(
    ("name", "entry", "write", "message"),
    [
        ("x.bin", "u16", lambda p: p.write_bytes(b"abc"), "tokens of 2 bytes .*got 3 bytes"),
        ("x.bin", "", lambda p: p.write_bytes(b"ab"), "expected the type of its tokens"),
        ("x.bin", "f32", lambda p: p.write_bytes(b"abcd"), "expected the type .*, got 'f32'"),
        ("x.npz", "y", lambda p: np.savez(p, x=NUMBERS), "expected an array of x, got 'y'"),
        ("x.npz", "x", lambda p: np.savez_compressed(p, x=NUMBERS), "compressed"),
        ("x.npz", "x", lambda p: p.write_bytes(b"PK\3\4abc"), "not a zip file"),
        ("x.npz", "x", lambda p: np.savez(p, x=np.array([{}])), "expected a type of"),
        ("x.safetensors", "y", lambda p: safetensors(p, x=NUMBERS), "expected an array of x"),
        ("x.safetensors", "x", lambda p: p.write_bytes(b"abc"), "its header is damaged"),
        ("x.safetensors", "x", lambda p: p.write_bytes(b"\2" + b"\0" * 7 + b"{]"), "damaged"),
        ("x.safetensors", "x", lambda p: p.write_bytes(b"\xff" * 9), "not a .safetensors"),
        ("x.safetensors", "x",
         lambda p: p.write_bytes(safetensors(p, x=NUMBERS).read_bytes()[:-1]), "at least .* bytes"),
        ("x.csv", "", lambda p: p.write_text("1,2"), "expected a file of .npy, .npz"),
        ("x.npy", "", lambda p: None, "expected the file .*x.npy, got none"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_clear_message(name, entry, write, message, tmp_path):
    write(tmp_path / name)
    with pytest.raises(ArrayError, match=message) as caught:
        array_in(tmp_path / name, entry)
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize("mapped", [1 << 27, 0])
@pytest.mark.parametrize("inner", [1, PAGE // 4])
def test_a_part_is_read_without_the_rest(inner, mapped, tmp_path, monkeypatch):
    """Any ranges of a tensor, of rows in any order; in long runs no byte of another rank. Short
    rows of small files are mapped, of large ones they are read."""
    monkeypatch.setattr(files, "MAPPED", mapped)
    x = np.random.default_rng(0).integers(0, 100, (5, 4, 3, inner)).astype("<i4")
    np.save(tmp_path / "x.npy", x)
    reader, seen = ArrayReader(array_in(tmp_path / "x.npy")), []
    bytes_at = reader._bytes
    monkeypatch.setattr(reader, "_bytes", lambda at, n: (seen.append(n), bytes_at(at, n))[1])
    cuts = [[(0, 5), (2, 4), (3, 3)], [(0, 4), (1, 3)], [(0, 3), (1, 2)], [(0, inner), (0, 1)]]
    for bounds in itertools.product(*cuts):
        window = tuple(slice(*b) for b in bounds)
        assert reader.read(bounds).tolist() == x[window].tolist()
        seen.clear()
        found = reader.read(bounds[1:], torch.tensor([3, 0, 1, 4, 4]))
        assert found.tolist() == x[[3, 0, 1, 4, 4]][(slice(None), *window[1:])].tolist()
        if bounds[3] == (0, PAGE // 4):
            assert sum(seen) == found.nbytes
    assert (not reader._maps) == (mapped == 0 or inner == PAGE // 4)


@pytest.mark.parametrize(("columns", "mapped"), [(7, 1 << 27), (7, 0), (PAGE, 0)])
def test_a_file_that_becomes_shorter_is_an_error(columns, mapped, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAPPED", mapped)
    np.save(tmp_path / "x.npy", np.ones((12, columns)))
    reader = ArrayReader(array_in(tmp_path / "x.npy"))
    for _ in range(2):
        with pytest.raises(ArrayError, match=r"x\.npy was cut off while it was read"):
            assert (reader.read([(0, columns)], torch.tensor([1, 11])) == 1).all()
            os.truncate(tmp_path / "x.npy", 128 + 8 * 11 * columns)
            reader.read([(0, columns)], torch.tensor([1, 11]))


# ---- rows of steps ---------------------------------------------------------------------------


class Ranks:
    """The inputs of a step on each rank of a mesh."""

    def __init__(self, mesh, *args):
        step = PlanFunction("step", "step", "step", "f32", args, ())
        plan = ProgramPlan(Path(), "m", mesh, (), (step,), None)
        count = int(np.prod([n for _, n in mesh]))
        self.meshes = [rt.Mesh(mesh, rank) for rank in range(count)]
        states = [States(plan, mesh, 5) for mesh in self.meshes]
        self.inputs, self.args = [Inputs(one, step) for one in states], args

    def compare(self, step, wanted):
        """Compare each rank's inputs with the slices of global ones."""
        for mesh, inputs in zip(self.meshes, self.inputs, strict=True):
            for arg, x, want in zip(self.args, inputs.at(step), wanted, strict=True):
                bounds = rt.local_bounds(mesh, arg.shape, arg.dims)
                assert x.tolist() == want[tuple(slice(*b) for b in bounds)].tolist()
                assert x.is_contiguous()


def fed(name, shape, dims, path, entry="", dtype="i32", shift=None, **init):
    """Return an input that is fed with the rows of a file."""
    arg = PlanArgument(name, shape, dtype, dims, "input", name, {"kind": "file", **init})
    source = array_in(path, entry)
    source = source if shift is None else sequences(source, arg.row, shift)
    return PlanArgument(name, shape, dtype, dims, "input", name, arg.init, source)


MESHES = [
    ((), ((), (), ())),
    ((("d", 2),), (("d",), (), ())),
    ((("d", 4),), ((), ("d",), ())),
    ((("a", 2), ("b", 2)), (("a",), (), ("b",))),
    ((("a", 2), ("b", 2)), (("b", "a"), (), ())),
]


@pytest.mark.parametrize(("mesh", "dims"), MESHES)
def test_on_every_mesh_a_step_has_the_same_rows(mesh, dims, tmp_path):
    """Full, data-parallel, and by the layout of all dimensions; with a shard that is uneven."""
    rows = np.random.default_rng(0).integers(-1000, 1000, (13, 3, 5))
    np.save(tmp_path / "x.npy", rows)
    ranks = Ranks(mesh, fed("x", (4, 3, 5), dims, tmp_path / "x.npy"))
    in_order = Ranks(mesh, fed("x", (4, 3, 5), dims, tmp_path / "x.npy", shuffle=False))
    for step in (0, 1, 3, 1000):
        ranks.compare(step, [rows[orders.batch_rows(13, step, 4, 5)]])
        in_order.compare(step, [rows[[(4 * step + k) % 13 for k in range(4)]]])


@pytest.mark.parametrize(("mesh", "dims"), [(m, d[:2]) for m, d in MESHES[:4]])
def test_tokens_are_packed_into_rows(mesh, dims, tmp_path):
    """Every token but the first is a target once in an epoch, next to the token before it."""
    length, batch = 6, 4
    for count in (50, 55):  # 8 and 9 sequences
        tokens = np.random.default_rng(1).integers(0, 1 << 16, count).astype("<u2")
        tokens.tofile(tmp_path / "t.bin")
        n = (count - 1) // length
        x, y = tokens[: n * length].reshape(n, length), tokens[1 : n * length + 1].reshape(n, -1)
        pair = [fed(name, (batch, length), dims, tmp_path / "t.bin", "u16", dtype, shift=shift)
                for shift, (name, dtype) in enumerate([("x", "i32"), ("y", "i64")])]  # fmt: skip
        ranks = Ranks(mesh, *pair)
        for step in range(4):
            drawn = orders.batch_rows(n, step, batch, 5)
            ranks.compare(step, [x[drawn].astype(int), y[drawn].astype(int)])


def test_steps_after_a_restart_have_the_rows_that_they_would_have_had(tmp_path):
    np.save(tmp_path / "x.npy", NUMBERS)
    micro = {"microbatches": 2}
    for shape, more in (((5, 7), {}), ((2, 5, 7), micro)):
        arg = fed("x", shape, ((),) * len(shape), tmp_path / "x.npy", **more)
        (inputs,), (again,) = (Ranks((), arg).inputs for _ in range(2))
        every = [x.tolist() for (x,) in inputs.ahead(range(9))]
        assert [x.tolist() for (x,) in again.ahead(range(6, 9))] == every[6:]
        assert every == [inputs.at(step)[0].tolist() for step in range(9)]
        batches = [b for step in every for b in (step if more else [step])]
        want = [NUMBERS[orders.batch_rows(12, k, 5, 5)].tolist() for k in range(len(batches))]
        assert batches == want


def test_a_number_that_the_type_does_not_hold_is_an_error_with_its_row(tmp_path):
    rows = NUMBERS.copy()
    rows[9, 3] = 1 << 31
    np.save(tmp_path / "x.npy", rows)
    (inputs,) = Ranks((), fed("x", (12, 7), ((), ()), tmp_path / "x.npy")).inputs
    with pytest.raises(PlanError, match=r"x: expected numbers that i32 holds, got 2147483648 in r"
                                        r"ow 9 of .*x\.npy"):  # fmt: skip
        inputs.at(0)


# ---- ahead of use ----------------------------------------------------------------------------


def test_few_steps_are_prepared_ahead_and_an_error_is_that_of_its_step(tmp_path):
    np.save(tmp_path / "x.npy", NUMBERS)
    (inputs,) = Ranks((), fed("x", (5, 7), ((), ()), tmp_path / "x.npy")).inputs
    read, begun = inputs._host, []

    def failing(step):
        begun.append(step)
        if step == 4:
            raise PlanError("no such luck")
        return read(step)

    inputs._host = failing
    done = []
    with pytest.raises(PlanError, match="no such luck"):
        for step, _ in enumerate(inputs.ahead(range(9))):
            done.append(step)
            assert max(begun) <= step + AHEAD
    assert done == [0, 1, 2, 3]
    for thread in threading.enumerate():
        if thread.name.startswith("inputs"):
            thread.join(10)
            assert not thread.is_alive()
    assert max(begun) <= 4 + AHEAD


@pytest.mark.parametrize("shape", [(64, 1 << 14), (2048, 64)])
def test_reading_a_large_file_needs_no_memory(shape, tmp_path):
    """Of a file of 10 GB, which has no blocks on disk, pages of 60 MB or more are read, in the
    long form of 20 GB: of long rows and of short ones."""
    path = tmp_path / "tokens.bin"
    path.touch()
    os.truncate(path, 10 << 30)
    arg = fed("x", shape, ((), ()), path, "u16", shift=0)
    (inputs,) = Ranks((), arg).inputs
    inputs.at(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
    before, steps = peak_bytes(), extent(30, 10_000)
    for step in range(steps):
        (x,) = inputs.at(step)
        assert x.shape == shape
    assert peak_bytes() - before < 40 << 20


def peak_bytes():
    """Return the peak of the resident bytes of this process since it was last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(peak) << 10
