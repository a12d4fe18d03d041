"""The process group of the backend `shm`: ranks of one machine, which share memory.

An operation starts with copying what other ranks are to read into memory that they see too, and
with a message to each of them; it ends with reading, or adding up, what is in theirs. So no rank
waits for one that has started, but for large all-reduces, of which each rank adds up a part while
it waits; and there are no threads. Sums are in the order of ranks: they have the same bits on all.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .links import Links
from .moves import GroupMoves, PeerTensors
from .operations import OperationHandle
from .reductions import function_of

NAME = "shm"

ONE_PASS = 1 << 20
"""The maximum bytes of the tensors of all ranks that each reduces all by itself, in an all-reduce:
reading more takes longer than another round of messages."""

TensorSequence = Sequence[Tensor]

_Base: Any = dist.ProcessGroup  # each call of it is declared with several forms


class SharedMemoryGroup(_Base):
    """A process group: the calls of torch.distributed, with tensors on CPUs.

    A list of tensors in a call is moved at once; those of an all-reduce one by one. Collectives of
    a group, and waits for them, are to be called by one thread at a time.

    Args:
        options: torch's: the store in which the ranks meet, their numbers, and the time-out.
    """

    def __init__(self, options: Any):
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        ranks = list(options.global_ranks_in_group) or list(range(size))
        seconds = options.timeout.total_seconds()
        self._rank, self._size = rank, size
        self._name, self._description = options.group_id, ""
        self._moves = GroupMoves(Links(options.store, ranks, rank, seconds), seconds)

    supports_coalescing = True
    """Collectives of several tensors move them at once, without copies. Torch's backends have this
    attribute."""

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        """Torch's name of the group."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        """The purpose of the group."""
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def shutdown(self) -> None:
        """Close the links to the other ranks, once all is sent."""
        self._moves.leave()

    def abort(self) -> None:
        """Close the links to the other ranks."""
        self._moves.links.close()

    # ---- moves -------------------------------------------------------------------------------

    def allgather(
        self, outs: Sequence[TensorSequence], given: TensorSequence, opts: Any = None
    ) -> OperationHandle:
        """Move tensor i of each rank into list i of each, which has a tensor for each rank."""
        return self.allgather_coalesced(list(zip(*outs, strict=True)), given)

    def allgather_coalesced(
        self, outs: Sequence[TensorSequence], given: TensorSequence, opts: Any = None
    ) -> Any:
        """Move the tensors of each rank into the list that is the rank's, on each."""
        _check(given, *outs)
        incoming = {peer: outs[peer] for peer in self._moves.others}
        copied = list(zip(outs[self._rank], given, strict=True))
        return self._move("all-gather", self._to_all(given), incoming, copied)

    def all_gather_single_coalesced(
        self, outs: TensorSequence, given: TensorSequence, opts: Any = None
    ) -> OperationHandle:
        """Move each tensor of each rank into the rank's block of one, on each."""
        return self.allgather_coalesced(self._blocks(outs), given)

    def all_gather_single(self, out: Tensor, given: Tensor, opts: Any = None) -> OperationHandle:
        """Move the tensor of each rank into the rank's block of one, on each."""
        return self.allgather_coalesced(self._blocks([out]), [given])

    def alltoall(
        self, outs: TensorSequence, given: TensorSequence, opts: Any = None
    ) -> OperationHandle:
        """Move tensor k of each rank to rank k."""
        _check(outs, given)
        others = self._moves.others
        outgoing = {peer: [given[peer]] for peer in others if given[peer].numel()}
        incoming = {peer: [outs[peer]] for peer in others if outs[peer].numel()}
        own = [(outs[self._rank], given[self._rank])]
        return self._move("all-to-all", outgoing, incoming, own)

    def all_to_all_single(
        self, out: Tensor, given: Tensor, received: Sequence[int], sent: Sequence[int],
        opts: Any = None,
    ) -> OperationHandle:  # fmt: skip
        """Move part k of each rank to rank k, into the part that is the sender's.

        Args:
            received, sent: the sizes of parts in the first dimension; even if there are none.
        """
        parts = (
            list(x.split(list(sizes))) if sizes else [block for (block,) in self._blocks([x])]
            for x, sizes in ((out, received), (given, sent))
        )
        return self.alltoall(*parts)

    def broadcast(self, tensors: TensorSequence, opts: Any) -> OperationHandle:
        """Move the tensors of one rank into those of the others."""
        _check(tensors)
        if opts.rootRank == self._rank:
            return self._move("broadcast", self._to_all(tensors), {})
        return self._move("broadcast", {}, {opts.rootRank: tensors})

    def gather(
        self, outs: Sequence[TensorSequence], given: TensorSequence, opts: Any
    ) -> OperationHandle:
        """Move tensor i of each rank into list i of one, which has a tensor for each rank."""
        _check(given, *outs)
        if opts.rootRank != self._rank:
            return self._move("gather", {opts.rootRank: given}, {})
        rows = list(zip(*outs, strict=True))
        copied = list(zip(rows[self._rank], given, strict=True))
        return self._move("gather", {}, {peer: rows[peer] for peer in self._moves.others}, copied)

    def scatter(
        self, outs: TensorSequence, given: Sequence[TensorSequence], opts: Any
    ) -> OperationHandle:
        """Move tensor k of list i of one rank into tensor i of rank k."""
        _check(outs, *given)
        if opts.rootRank != self._rank:
            return self._move("scatter", {}, {opts.rootRank: outs})
        rows = list(zip(*given, strict=True))
        copied = list(zip(outs, rows[self._rank], strict=True))
        return self._move("scatter", {peer: rows[peer] for peer in self._moves.others}, {}, copied)

    def barrier(self, opts: Any = None) -> OperationHandle:
        """Wait for all ranks."""
        return self._move("barrier", self._to_all([]), self._to_all([]))

    def send(self, tensors: TensorSequence, peer: int, tag: int) -> OperationHandle:
        """Send tensors to a rank, which need not have asked for them."""
        _check(tensors)
        _check_tag(tag)
        key = self._moves.tagged("to", peer, tag)
        return self._moves.start("send", self._moves.move("send", key, {peer: tensors}, {}))

    def recv(self, tensors: TensorSequence, peer: int, tag: int) -> OperationHandle:
        """Receive what a rank has sent with this tag: messages are received in their order."""
        _check(tensors)
        _check_tag(tag)
        key = self._moves.tagged("of", peer, tag)
        steps = self._moves.move("send", key, {}, {peer: tensors})
        return self._moves.start("receive", steps, tensors, (peer, key))

    # ---- reductions --------------------------------------------------------------------------

    def allreduce(self, tensors: TensorSequence, opts: Any = None) -> OperationHandle:
        """Reduce tensors of all ranks, in place."""
        _check(tensors)
        op, keys = _reduction(opts), [self._moves.key() for _ in tensors]

        def steps() -> Any:
            for x, key in zip(tensors, keys, strict=True):
                dense = x.contiguous()
                if self._size > 1 and self._size * x.numel() * x.element_size() > ONE_PASS:
                    yield from self._moves.all_reduce(dense, op, key)
                else:
                    sent, others = self._to_all([dense]), self._moves.others
                    yield from self._moves.reduce(
                        "all-reduce", key, sent, [dense], [dense], op, others
                    )
                if dense is not x:
                    x.copy_(dense)

        return self._moves.start("all-reduce", steps(), tensors)

    def reduce(self, tensors: TensorSequence, opts: Any) -> OperationHandle:
        """Reduce tensors of all ranks, into those of one."""
        _check(tensors)
        op = _reduction(opts)
        if opts.rootRank != self._rank:
            return self._move("reduce", {opts.rootRank: tensors}, {})
        return self._reduce("reduce", {}, tensors, tensors, op)

    def reduce_scatter(
        self, outs: TensorSequence, given: Sequence[TensorSequence], opts: Any = None
    ) -> OperationHandle:
        """Reduce tensor k of list i of all ranks, into tensor i of rank k."""
        return self._reduce_rows(outs, list(zip(*given, strict=True)), opts)

    def reduce_scatter_single_coalesced(
        self, outs: TensorSequence, given: TensorSequence, opts: Any = None
    ) -> OperationHandle:
        """Reduce block k of each tensor of all ranks, into one of rank k."""
        return self._reduce_rows(outs, self._blocks(given), opts)

    def reduce_scatter_single(
        self, out: Tensor, given: Tensor, opts: Any = None
    ) -> OperationHandle:
        """Reduce block k of a tensor of all ranks, into one of rank k."""
        return self._reduce_rows([out], self._blocks([given]), opts)

    def _reduce_rows(
        self, outs: TensorSequence, rows: Sequence[TensorSequence], opts: Any
    ) -> OperationHandle:
        _check(outs, *rows)
        outgoing = {peer: rows[peer] for peer in self._moves.others}
        return self._reduce("reduce-scatter", outgoing, rows[self._rank], outs, _reduction(opts))

    # ---- names of torch 2.11, and what it has beside -------------------------------------------

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    allreduce_coalesced = allreduce

    def recv_anysource(self, tensors: TensorSequence, tag: int) -> OperationHandle:
        raise _unsupported_error("receives from any rank")

    def monitored_barrier(self, *_: Any, **__: Any) -> None:
        raise _unsupported_error("monitored barriers")

    # ---- common parts ------------------------------------------------------------------------

    def _move(
        self, kind: str, outgoing: PeerTensors, incoming: PeerTensors,
        copied: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> OperationHandle:  # fmt: skip
        steps = self._moves.move(kind, self._moves.key(), outgoing, incoming, copied)
        results = [x for parts in incoming.values() for x in parts]
        return self._moves.start(kind, steps, results)

    def _reduce(
        self, kind: str, outgoing: PeerTensors, own: TensorSequence, outs: TensorSequence, op: Any
    ) -> OperationHandle:
        key, others = self._moves.key(), self._moves.others
        steps = self._moves.reduce(kind, key, outgoing, own, outs, op, others)
        return self._moves.start(kind, steps, outs)

    def _to_all(self, tensors: TensorSequence) -> PeerTensors:
        return dict.fromkeys(self._moves.others, tensors)

    def _blocks(self, tensors: TensorSequence) -> list[tuple[Tensor, ...]]:
        """Return for each rank its blocks of tensors, flat."""
        for x in tensors:
            if x.numel() % self._size:
                raise ValueError(
                    f"shm: expected a multiple of {self._size} elements, got {x.shape}"
                )
        rows = (x.view(self._size, x.numel() // self._size).unbind() for x in tensors)
        return list(zip(*rows, strict=True))


def _reduction(opts: Any) -> Any:
    """Return the reduction of options: sums by default."""
    op = dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
    op = getattr(op, "op", op)
    function_of(op)  # an error of the call, not of a wait for it
    return op


def _check(*lists: TensorSequence) -> None:
    """Check that tensors are dense, and on CPUs."""
    for tensors in lists:
        for x in tensors:
            if not x.is_cpu:
                raise ValueError(f"shm: expected tensors on CPUs, got one on {x.device}; use nccl")
            if x.layout != torch.strided:
                raise ValueError(f"shm: expected dense tensors, got {x.layout}; use gloo")


def _check_tag(tag: int) -> None:
    if tag < 0:
        raise ValueError(f"shm: expected a tag of at least 0, got {tag}")


def _unsupported_error(what: str) -> NotImplementedError:
    return NotImplementedError(f"shm has no {what}; use gloo")


def register() -> None:
    """Make the backend known to torch.distributed."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            NAME, lambda options, _: SharedMemoryGroup(options), extended_api=True, devices=["cpu"]
        )


register()
