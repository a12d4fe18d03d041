"""A trainer that another process calls: a loop in a notebook, with one rank in each process.

Each rank reads calls from a pipe of its own. A call is a line of JSON, then the bytes of its
tensors:

    {"method": "step", "arguments": {}, "tensors": [["x", "f32", [4, 16]], ["labels", "i64", [4]]]}

The tensors of a step and of the batches of an evaluation are this rank's shards. Rank 0 answers
each call by an event, {"event": "answer", "value": ...}; of an evaluation after its last batch:

    evaluate {"function", "ema"}, batch ..., end {"loss": 1.2}
    step {"name"}                                {"loss": 2.3, "metrics": {"share": 0.5}}
    backward {"name", "weight"}                  as of a step
    update {"name"}; grad_norm {"name"}          null; 1.5
    grads {"name", "path"}                       null; the tensors are in an .npz by number
    lr {"name"}; set_lr {"name", "rate"}         0.1
    call {"function", "ema", "path"}             null; the results are in an .npz by number
    generate {"count", "function", ..., "path"}  null; the tokens are in an .npz
    save {"path", "keep", "loader"}              the number of steps; "loader": a file, or null
    load {"path"}                                the number of steps
    state_dict {"path", "ema"}                   null; the tensors are in an .npz by number
    load_state_dict                              null

An error ends the rank, as in a run. The end of the pipe ends the training.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from ..data.files import save_npz
from ..plan.program import PlanError
from .events import Events
from .states import DTYPES
from .trained_steps import TrainedStep
from .trainer import Trainer

CALLS = "SHARDIR_CALLS"
"""The environment variable with the pipes of all ranks: `fd:5,fd:7`."""


class Call(NamedTuple):
    """A call of a method of a trainer."""

    method: str
    arguments: dict[str, Any]
    tensors: dict[str, Tensor]


def pipe_of_calls(rank: int) -> int | None:
    """Return the pipe from which a rank reads calls; None in a run."""
    pipes = os.environ.get(CALLS)
    return None if pipes is None else int(pipes.split(",")[rank].removeprefix("fd:"))


def serve(trainer: Trainer, pipe: int, events: Events) -> None:
    """Call the methods of a trainer until the pipe ends.

    Raises:
        PlanError: an error of a call.
    """
    with os.fdopen(pipe, "rb") as file:
        while (call := _read(file)) is not None:
            events.send(event="answer", value=_answer(trainer, call, file))


def _answer(trainer: Trainer, call: Call, file: BinaryIO) -> Any:
    """Return the answer of a call. An evaluation reads its batches."""
    given = call.arguments
    match call.method:
        case "step":
            step = trainer[given["name"]]
            return _loss(step, step.step(call.tensors, local=True))
        case "backward":
            step = trainer[given["name"]]
            loss = step.backward(call.tensors, weight=given["weight"], local=True)
            return _loss(step, loss)
        case "update":
            trainer[given["name"]].update()
            return None
        case "grads":
            _write(trainer, given["path"], trainer[given["name"]].grads().values())
            return None
        case "grad_norm":
            return trainer[given["name"]].grad_norm
        case "evaluate":
            batches = _batches(file)
            return trainer.evaluate(batches, given["function"], local=True, ema=given["ema"])
        case "call":
            results = trainer.call(given["function"], call.tensors, local=True, ema=given["ema"])
            results = results if isinstance(results, tuple) else (results,)
            _write(trainer, given["path"], results)
            return None
        case "generate":
            path = given.pop("path")
            _write(trainer, path, [trainer.generate(call.tensors["prompt"], **given)])
            return None
        case "lr":
            return trainer[given["name"]].lr
        case "set_lr":
            trainer[given["name"]].lr = given["rate"]
            return trainer[given["name"]].lr
        case "save":
            state = given["loader"]
            state = Path(state).read_bytes() if state and trainer.rank == 0 else None
            trainer.checkpoint(given["path"], given["keep"], state)
            return trainer.steps_done
        case "load":
            trainer.load(given["path"])
            return trainer.steps_done
        case "state_dict":
            _write(trainer, given["path"], trainer.state_dict(ema=given["ema"]).values())
            return None
        case "load_state_dict":
            trainer.load_state_dict(call.tensors)
            return None
    raise PlanError(f"expected a method of a trainer, got {call.method}")


def _loss(step: TrainedStep, loss: Tensor) -> dict[str, Any]:
    return {"loss": loss.item(), "metrics": {name: x.item() for name, x in step.metrics.items()}}


def _write(trainer: Trainer, path: str, tensors: Iterable[Tensor]) -> None:
    """Write tensors to a file by number, on rank 0."""
    if trainer.rank == 0:
        save_npz(Path(path), {str(i): x for i, x in enumerate(tensors)})


def _batches(file: BinaryIO) -> Iterator[dict[str, Tensor]]:
    while (call := _read(file)) is not None and call.method == "batch":
        yield call.tensors


def _read(file: BinaryIO) -> Call | None:
    """Return the next call; None at the end of the pipe."""
    line = file.readline()
    if not line.endswith(b"\n"):
        return None
    header, tensors = json.loads(line), {}
    for name, dtype, shape in header["tensors"]:
        kind = DTYPES[dtype]
        memory = bytearray(math.prod(shape) * kind.itemsize)
        view = memoryview(memory)
        while view:
            count = file.readinto(view)  # type: ignore - of a file with a buffer
            if not count:
                return None
            view = view[count:]
        x = torch.frombuffer(memory, dtype=kind) if memory else torch.empty(0, dtype=kind)
        tensors[name] = x.view(shape)
    return Call(header["method"], header["arguments"], tensors)


def bytes_of(method: str, arguments: dict[str, Any], tensors: dict[str, Tensor]) -> bytes:
    """Return a call as it is written to a pipe."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    about = [[name, names[x.dtype], list(x.shape)] for name, x in tensors.items()]
    line = json.dumps({"method": method, "arguments": arguments, "tensors": about}) + "\n"
    flat = (x.detach().cpu().contiguous().reshape(-1) for x in tensors.values())
    data = (x.view(torch.uint8).numpy().tobytes() for x in flat)
    return b"".join([line.encode(), *data])
