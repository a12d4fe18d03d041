"""Programs of StableHLO run by XLA on 8 CPU devices, in a process of its own: their number is set
before jax is imported.

    (answer,) = xla.run([Request(text, [x, w])])      one process for all requests
"""

import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Bounds = list[list[tuple[int, int]]]
"""For each device the range of each dimension that it holds."""


@dataclass
class Request:
    """A program, with its arguments and their element types: whole arrays, which XLA's partitioner
    spreads; or, `of_partitions`, a list of arrays for each argument, which are what they get."""

    text: str
    arguments: Sequence[Any]
    elements: Sequence[str] = ()
    of_partitions: bool = False


@dataclass
class Answer:
    """The results of a program; with `of_partitions`, a list for each. Or the error."""

    results: list[Any] = field(default_factory=list)
    arguments_at: list[Bounds] = field(default_factory=list)
    results_at: list[Bounds] = field(default_factory=list)
    hlo: str = ""
    error: str = ""


SERVER = "import sys; sys.path.insert(0, sys.argv[1]); from support.xla import serve; serve()"


def run(requests: Sequence[Request]) -> list[Answer]:
    """Run programs in the process, which ends with this one."""
    process = _process()
    assert process.stdin is not None and process.stdout is not None
    try:
        pickle.dump(list(requests), process.stdin)
        process.stdin.flush()
        return pickle.load(process.stdout)
    except (EOFError, BrokenPipeError):
        _process.cache_clear()
        raise AssertionError(f"XLA's process ended with code {process.wait()}") from None


@cache
def _process() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", SERVER, str(Path(__file__).parents[1])],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def serve() -> None:
    """Answer requests until there are no more."""
    import os

    from support import jax_devices

    os.environ["XLA_FLAGS"] = f"{jax_devices.FLAGS} --xla_backend_optimization_level=0"
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what XLA prints is no answer
    while True:
        try:
            requests = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answers = []
        for request in requests:
            try:
                answers.append(_answer(request))
            except Exception as e:
                answers.append(Answer(error=f"{type(e).__name__}: {e}"))
        pickle.dump(answers, out)
        out.flush()


def _answer(request: Request) -> Answer:
    import re

    import jax
    import jax.numpy as jnp
    from jax._src.sharding_impls import GSPMDSharding
    from jaxlib import xla_client

    found = re.search(r"mhlo.num_partitions = (\d+)", request.text)
    count = int(found[1]) if found else 1
    devices = jax.devices()[:count]
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = 1, count
    build = options.executable_build_options
    build.num_replicas, build.num_partitions = 1, count
    build.use_spmd_partitioning = build.use_shardy_partitioner = count > 1
    build.device_assignment = xla_client.DeviceAssignment.create(np.arange(count)[None])
    program = devices[0].client.compile_and_load(
        request.text, xla_client.DeviceList(tuple(devices)), options
    )
    elements = request.elements or [None] * len(request.arguments)

    def typed(x: Array, element: str | None) -> Any:
        return x.astype(jnp.bfloat16) if element == "bf16" else (
            x.astype(np.float16) if element == "f16" else x
        )  # fmt: skip

    def bounds(shardings: Any, shapes: Any) -> list[Bounds]:
        return [
            [[(s.start or 0, n if s.stop is None else s.stop)
              for s, n in zip(index, shape, strict=True)]
             for index in sharding.devices_indices_map(tuple(shape)).values()]
            for sharding, shape in zip(shardings, shapes, strict=True)
        ]  # fmt: skip

    arguments, answer = [], Answer(hlo=program.get_hlo_text() if count > 1 else "")
    if request.of_partitions or count == 1:
        # parts of several arrays as if they were copies of one: their shapes are those of shards
        everywhere = GSPMDSharding.get_replicated(devices)
        for x, element in zip(request.arguments, elements, strict=True):
            parts = [
                jax.device_put(typed(np.asarray(p), element), d)
                for p, d in zip(x if request.of_partitions else [x], devices, strict=True)
            ]
            arguments.append(
                jax.make_array_from_single_device_arrays(parts[0].shape, everywhere, parts)
            )
    else:
        own = program.get_parameter_shardings()
        shardings = [GSPMDSharding(devices, s) for s in own or []]
        answer.arguments_at = bounds(shardings, [np.shape(x) for x in request.arguments])
        for x, element, sharding in zip(request.arguments, elements, shardings, strict=True):
            arguments.append(jax.device_put(typed(np.asarray(x), element), sharding))
    outputs = program.execute_sharded(arguments).disassemble_into_single_device_arrays()

    def plain(x: Any) -> Array:
        x = np.asarray(x)
        return x.astype(np.float32) if x.dtype.itemsize == 2 and x.dtype.kind in "fV" else x

    if request.of_partitions or count == 1:
        answer.results = [[plain(x) for x in parts] for parts in outputs]
        if not request.of_partitions:
            answer.results = [parts[0] for parts in answer.results]
        return answer
    shardings = [GSPMDSharding(devices, s) for s in program.get_output_shardings() or []]
    for parts, sharding in zip(outputs, shardings, strict=True):
        shape = _shape_of(parts[0].shape, sharding)
        answer.results_at += bounds([sharding], [shape])
        answer.results.append(plain(
            jax.make_array_from_single_device_arrays(tuple(shape), sharding, parts)
        ))  # fmt: skip
    return answer


def _shape_of(shard: Sequence[int], sharding: Any) -> list[int]:
    """The global shape of even shards."""
    partitions = sharding.num_dims_partitions if hasattr(sharding, "num_dims_partitions") else None
    if partitions is None:
        proto = sharding._hlo_sharding
        partitions = (
            [1] * len(shard) if proto.is_replicated()
            else proto.tile_assignment_dimensions()[: len(shard)]
        )  # fmt: skip
    return [n * k for n, k in zip(shard, partitions, strict=True)]


def merged(texts: Sequence[str]) -> str:
    """Return one program that calls those of all texts, which are for one device, in turn."""
    bodies, calls, arguments, results = [], [], [], []
    for k, text in enumerate(texts):
        lines = text.splitlines()
        first = next(i for i, line in enumerate(lines) if "func.func" in line)
        head, *body = lines[first:-1]
        types = [part.split(" ")[1].rstrip(",") for part in head.split("%")[1:]]
        types = [t.removesuffix(")") for t in types]
        last = body[-2].strip()
        outs = last.split(" : ")[1].split(", ")
        names = [f"%x{len(arguments) + i}" for i in range(len(types))]
        arguments += [f"{n}: {t}" for n, t in zip(names, types, strict=True)]
        bodies += [head.replace("public @main", f"private @case{k}"), *body]
        left = f"%y{k}" if len(outs) == 1 else f"%y{k}:{len(outs)}"
        calls.append(f"    {left} = func.call @case{k}({', '.join(names)}) : "
                     f"({', '.join(types)}) -> ({', '.join(outs)})")  # fmt: skip
        values = [f"%y{k}"] if len(outs) == 1 else [f"%y{k}#{i}" for i in range(len(outs))]
        results += [*zip(values, outs, strict=True)]
    outputs = ", ".join(t for _, t in results)
    returned = ", ".join(v for v, _ in results)
    return "\n".join([
        "module @merged attributes {mhlo.num_partitions = 1 : i32} {", *bodies,
        f"  func.func public @main({', '.join(arguments)}) -> ({outputs}) {{", *calls,
        f"    func.return {returned} : {outputs}", "  }", "}", "",
    ])  # fmt: skip
