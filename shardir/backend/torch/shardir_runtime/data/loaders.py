"""Loaders of a loop: their states in checkpoints, and batches that are read ahead.

A loader with a state has `state_dict` and `load_state_dict`, such as torchdata's
StatefulDataLoader or an IterableDataset of Hugging Face. A checkpoint has it in one file if there
is one state, or if the states of all ranks are equal, so that any mesh reads it; else in a file for
each rank, which the same number of ranks reads:

    FOLDER/step-00000100/loader.pt
    FOLDER/step-00000100/loader-00001-of-00004.pt ...
"""

import hashlib
import io
import queue
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..plan.fields import PlanError

FILE = "loader.pt"
"""The file of the only state of a loader in a checkpoint."""

LOADER = "SHARDIR_LOADER"
"""The environment variable with the folder in which a launcher writes the states of its loader."""

_FILE_OF_RANK = re.compile(r"loader-\d{5}-of-(\d{5})\.pt")
_POLL_SECONDS = 0.05


def is_stateful(loader: object) -> bool:
    """Return whether a loader has a state."""
    if isinstance(loader, Prefetch):
        return is_stateful(loader.loader)
    return all(callable(getattr(loader, n, None)) for n in ("state_dict", "load_state_dict"))


def check_stateful(loader: object) -> None:
    """Raise PlanError for a loader without a state."""
    if not is_stateful(loader):
        source = loader.loader if isinstance(loader, Prefetch) else loader
        raise PlanError(
            "expected a loader with state_dict() and load_state_dict(), such as torchdata's "
            f"StatefulDataLoader, got {type(source).__name__}"
        )


def state_bytes(loader: Any, check: bool = True) -> bytes:
    """Return the state of a loader as the content of a file.

    Args:
        check: whether to read it again, which takes as long as to write it.

    Raises:
        PlanError: the loader has no state, or one with objects of other classes than Python's and
            torch's, which a file without code cannot have.
    """
    check_stateful(loader)
    file = io.BytesIO()
    try:
        torch.save(loader.state_dict(), file)
        if check:
            torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except Exception as error:
        raise PlanError(
            f"expected a state of {type(loader).__name__} of tensors, numbers, texts, lists and "
            f"dicts, got one that cannot be stored: {str(error).splitlines()[0]:.200}"
        ) from None
    return file.getvalue()


def state_file(folder: Path, step: int) -> Path:
    """Return the file in which a launcher has the state of its loader after the batch of a step."""
    return folder / f"{step}.pt"


def files_of(state: bytes | None, rank: int, all_checksums: list[int]) -> dict[str, bytes]:
    """Return the files of a checkpoint that a rank writes for its loader.

    Args:
        all_checksums: `checksum_of` the state of each rank.
    """
    having = [r for r, checksum in enumerate(all_checksums) if checksum >= 0]
    if state is None:
        return {}
    if len({all_checksums[r] for r in having}) == 1:
        return {FILE: state} if rank == having[0] else {}
    return {f"loader-{rank + 1:05}-of-{len(all_checksums):05}.pt": state}


def checksum_of(state: bytes | None) -> int:
    """Return a number by which ranks compare their states; -1 without one."""
    return -1 if state is None else int.from_bytes(hashlib.sha256(state).digest()[:7])


def read_state(checkpoint: Path, loader: object, rank: int = 0, size: int = 1) -> Any:
    """Return the state of a rank's loader in a checkpoint.

    Raises:
        PlanError: the loader has no state, the checkpoint has none for this number of ranks, or it
            is damaged.
    """
    check_stateful(loader)
    path = checkpoint / FILE
    if not path.is_file():
        path = checkpoint / f"loader-{rank + 1:05}-of-{size:05}.pt"
    if not path.is_file():
        names = (_FILE_OF_RANK.fullmatch(p.name) for p in sorted(checkpoint.glob("loader-*.pt")))
        counts = [int(found[1]) for found in names if found]
        got = f"those of {counts[0]} ranks, which differ" if counts else "none"
        raise PlanError(
            f"{checkpoint}: expected the state of a loader for {size} rank{'s' * (size > 1)}, got "
            f"{got}; " + ("use as many ranks" if counts else "leave out the loader, and give the "
                          "batches that are left")
        )  # fmt: skip
    try:
        return torch.load(path, weights_only=True)
    except Exception as error:
        raise PlanError(f"{path} cannot be read: {str(error).splitlines()[0]:.200}") from None


class Prefetch:
    """Batches of a loader, which a thread reads ahead of a loop. An error of the loader is raised
    in the loop, where its batch would come. The thread ends with the loop.

    Args:
        loader: any iterable; an iterator loses the batches that were read ahead of a loop's end.
        place: begins to move a batch to the device, and returns the function that completes it.
        ahead: the number of batches that are read ahead.
    """

    def __init__(
        self, loader: Iterable[Any], place: Callable[[Any], Callable[[], Any]] | None = None,
        ahead: int = 2,
    ):  # fmt: skip
        if not isinstance(loader, Iterable) or isinstance(loader, str):
            raise PlanError(
                f"expected an iterable of batches to read ahead, got {type(loader).__name__}; give "
                "a DataLoader or a list: for x, y in trainer.prefetch(loader, ahead=3)"
            )
        if not isinstance(ahead, int) or ahead < 1:
            raise PlanError(f"expected at least 1 batch that is read ahead, got {ahead!r:.60}")
        self.loader, self.place, self.ahead = loader, place or _as_it_is, ahead
        self._state: Any = None

    def __iter__(self) -> Iterator[Any]:
        read: queue.Queue[tuple[str, Any, Any]] = queue.Queue(self.ahead)
        ended = threading.Event()

        def put(kind: str, value: Any = None, state: Any = None) -> bool:
            while not ended.is_set():
                try:
                    read.put((kind, value, state), timeout=_POLL_SECONDS)
                except queue.Full:
                    continue
                return True
            return False

        def work() -> None:
            try:
                for batch in self.loader:
                    if not put("batch", self.place(batch), self._read_state()):
                        return
                put("end", None, self._read_state())
            except BaseException as error:
                put("error", error)

        threading.Thread(target=work, name="prefetch", daemon=True).start()
        try:
            while True:
                kind, value, state = read.get()
                if kind == "error":
                    raise value
                self._state = state
                if kind == "end":
                    return
                yield value()
        finally:
            ended.set()

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore - where the loader has a length

    def _read_state(self) -> Any:
        if not is_stateful(self):
            return None
        loader: Any = self.loader
        return deepcopy(loader.state_dict())

    def state_dict(self) -> Any:
        """Return the state of the loader after the last batch that the loop has taken."""
        check_stateful(self)
        return self._read_state() if self._state is None else self._state

    def load_state_dict(self, state: Any) -> None:
        """Set the state of the loader."""
        check_stateful(self)
        loader: Any = self.loader
        loader.load_state_dict(state)
        self._state = state


def _as_it_is(batch: Any) -> Callable[[], Any]:
    return lambda: batch


def to_device(device: torch.device) -> Callable[[Any], Callable[[], Any]] | None:
    """Return the function that begins to copy the tensors of a batch to a GPU, on a stream of its
    own; None on a CPU."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)

    def place(batch: Any) -> Callable[[], Any]:
        with torch.cuda.stream(stream):
            copies = map_tensors(
                lambda x: x if x.is_cuda else x.pin_memory().to(device, non_blocking=True), batch
            )
            copied = stream.record_event()

        def complete() -> Any:
            here = torch.cuda.current_stream(device)
            here.wait_event(copied)
            map_tensors(lambda x: x.record_stream(here), copies)
            return copies

        return complete

    return place


def map_tensors(change: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return a tree of tuples, lists and mappings with its tensors changed."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(change, x) for key, x in tree.items()}
    if isinstance(tree, list | tuple):
        changed = [map_tensors(change, x) for x in tree]
        return type(tree)(*changed) if hasattr(tree, "_fields") else type(tree)(changed)
    return tree


def as_tensor(x: Any) -> Any:
    """Return an array of numpy as a tensor with the same memory; anything else as it is."""
    if not hasattr(x, "__array_interface__") or isinstance(x, Tensor):
        return x
    try:
        return torch.as_tensor(x if getattr(x, "flags", None) is None or x.flags.writeable
                               else x.copy())  # fmt: skip
    except (TypeError, ValueError, RuntimeError):  # of texts or objects
        return x
