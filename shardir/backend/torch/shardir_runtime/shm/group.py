"""The process group of the backend `shm`: ranks of one machine, which share memory.

An operation starts by copying tensors into shared memory and by sending a message to each reader;
it ends by reading, or adding up, the tensors of the other ranks. So a rank only waits for ranks
that have not started, and there are no threads. The exception is a large all-reduce: each rank adds
up a part of it while it waits. Sums are in the order of ranks: all ranks get the same bits.
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
"""The maximum bytes, summed over the ranks, of an all-reduce that each rank computes in full:
reading more takes longer than a second round of messages."""

TensorSequence = Sequence[Tensor]

_Base: Any = dist.ProcessGroup  # its methods have several overloads


class SharedMemoryGroup(_Base):
    """A process group of torch.distributed for tensors on CPUs.

    A call moves all tensors of a list at once; an all-reduce reduces them one by one. Only one
    thread at a time may call collectives of a group and wait for them.

    Args:
        options: torch's options: the store in which the ranks meet, their ranks, and the timeout.
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
    """Torch's attribute: one call moves several tensors, without copies."""

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
        """Torch's description of the group."""
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def shutdown(self) -> None:
        """Send the backlog, and close the links to the other ranks."""
        self._moves.leave()

    def abort(self) -> None:
        """Close the links to the other ranks."""
        self._moves.links.close()

    # ---- moves -------------------------------------------------------------------------------

    def allgather(
        self, outs: Sequence[TensorSequence], inputs: TensorSequence, opts: Any = None
    ) -> OperationHandle:
        """Move tensor i of rank k into `outs[i][k]` on all ranks."""
        return self.allgather_coalesced(list(zip(*outs, strict=True)), inputs)

    def allgather_coalesced(
        self, outs: Sequence[TensorSequence], inputs: TensorSequence, opts: Any = None
    ) -> Any:
        """Move the tensors of rank k into `outs[k]` on all ranks."""
        _check(inputs, *outs)
        incoming = {peer: outs[peer] for peer in self._moves.others}
        copied = list(zip(outs[self._rank], inputs, strict=True))
        return self._move("all-gather", self._to_all(inputs), incoming, copied)

    def all_gather_single_coalesced(
        self, outs: TensorSequence, inputs: TensorSequence, opts: Any = None
    ) -> OperationHandle:
        """Move tensor i of rank k into block k of `outs[i]` on all ranks."""
        return self.allgather_coalesced(self._blocks(outs), inputs)

    def all_gather_single(self, out: Tensor, source: Tensor, opts: Any = None) -> OperationHandle:
        """Move the tensor of rank k into block k of `out` on all ranks."""
        return self.allgather_coalesced(self._blocks([out]), [source])

    def alltoall(
        self, outs: TensorSequence, inputs: TensorSequence, opts: Any = None
    ) -> OperationHandle:
        """Move tensor k of rank i into `outs[i]` of rank k."""
        _check(outs, inputs)
        others = self._moves.others
        outgoing = {peer: [inputs[peer]] for peer in others if inputs[peer].numel()}
        incoming = {peer: [outs[peer]] for peer in others if outs[peer].numel()}
        own = [(outs[self._rank], inputs[self._rank])]
        return self._move("all-to-all", outgoing, incoming, own)

    def all_to_all_single(
        self, out: Tensor, source: Tensor, received: Sequence[int], sent: Sequence[int],
        opts: Any = None,
    ) -> OperationHandle:  # fmt: skip
        """Move part k of rank i into part i of rank k.

        Args:
            received, sent: the sizes of the parts of `out` and `source` in dimension 0; equal parts
                if empty.
        """
        parts = (
            list(x.split(list(sizes))) if sizes else [block for (block,) in self._blocks([x])]
            for x, sizes in ((out, received), (source, sent))
        )
        return self.alltoall(*parts)

    def broadcast(self, tensors: TensorSequence, opts: Any) -> OperationHandle:
        """Copy the tensors of the root rank into the tensors of the other ranks."""
        _check(tensors)
        if opts.rootRank == self._rank:
            return self._move("broadcast", self._to_all(tensors), {})
        return self._move("broadcast", {}, {opts.rootRank: tensors})

    def gather(
        self, outs: Sequence[TensorSequence], inputs: TensorSequence, opts: Any
    ) -> OperationHandle:
        """Move tensor i of rank k into `outs[i][k]` of the root rank."""
        _check(inputs, *outs)
        if opts.rootRank != self._rank:
            return self._move("gather", {opts.rootRank: inputs}, {})
        rows = list(zip(*outs, strict=True))
        copied = list(zip(rows[self._rank], inputs, strict=True))
        return self._move("gather", {}, {peer: rows[peer] for peer in self._moves.others}, copied)

    def scatter(
        self, outs: TensorSequence, inputs: Sequence[TensorSequence], opts: Any
    ) -> OperationHandle:
        """Move `inputs[i][k]` of the root rank into tensor i of rank k."""
        _check(outs, *inputs)
        if opts.rootRank != self._rank:
            return self._move("scatter", {}, {opts.rootRank: outs})
        rows = list(zip(*inputs, strict=True))
        copied = list(zip(outs, rows[self._rank], strict=True))
        return self._move("scatter", {peer: rows[peer] for peer in self._moves.others}, {}, copied)

    def barrier(self, opts: Any = None) -> OperationHandle:
        """Wait for all ranks."""
        return self._move("barrier", self._to_all([]), self._to_all([]))

    def send(self, tensors: TensorSequence, peer: int, tag: int) -> OperationHandle:
        """Send tensors to a rank, without waiting for its receive."""
        _check(tensors)
        _check_tag(tag)
        key = self._moves.tagged_key("to", peer, tag)
        return self._moves.start("send", self._moves.move("send", key, {peer: tensors}, {}))

    def recv(self, tensors: TensorSequence, peer: int, tag: int) -> OperationHandle:
        """Receive tensors of a rank. Messages with one tag arrive in the order of their sends."""
        _check(tensors)
        _check_tag(tag)
        key = self._moves.tagged_key("of", peer, tag)
        steps = self._moves.move("send", key, {}, {peer: tensors})
        return self._moves.start("receive", steps, tensors, (peer, key))

    # ---- reductions --------------------------------------------------------------------------

    def allreduce(self, tensors: TensorSequence, opts: Any = None) -> OperationHandle:
        """Reduce the tensors of all ranks, in place."""
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
        """Reduce the tensors of all ranks into the tensors of the root rank."""
        _check(tensors)
        op = _reduction(opts)
        if opts.rootRank != self._rank:
            return self._move("reduce", {opts.rootRank: tensors}, {})
        return self._reduce("reduce", {}, tensors, tensors, op)

    def reduce_scatter(
        self, outs: TensorSequence, inputs: Sequence[TensorSequence], opts: Any = None
    ) -> OperationHandle:
        """Reduce `inputs[i][k]` of all ranks into tensor i of rank k."""
        return self._reduce_rows(outs, list(zip(*inputs, strict=True)), opts)

    def reduce_scatter_single_coalesced(
        self, outs: TensorSequence, inputs: TensorSequence, opts: Any = None
    ) -> OperationHandle:
        """Reduce block k of tensor i of all ranks into `outs[i]` of rank k."""
        return self._reduce_rows(outs, self._blocks(inputs), opts)

    def reduce_scatter_single(
        self, out: Tensor, source: Tensor, opts: Any = None
    ) -> OperationHandle:
        """Reduce block k of the tensors of all ranks into `out` of rank k."""
        return self._reduce_rows([out], self._blocks([source]), opts)

    def _reduce_rows(
        self, outs: TensorSequence, rows: Sequence[TensorSequence], opts: Any
    ) -> OperationHandle:
        _check(outs, *rows)
        outgoing = {peer: rows[peer] for peer in self._moves.others}
        return self._reduce("reduce-scatter", outgoing, rows[self._rank], outs, _reduction(opts))

    # ---- names in torch 2.11, and unsupported calls ---------------------------------------------

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
        """Split tensors into one flat block per rank; return the blocks of each rank.

        Raises:
            ValueError: the number of elements is no multiple of the number of ranks.
        """
        for x in tensors:
            if x.numel() % self._size:
                raise ValueError(
                    f"shm: expected a multiple of {self._size} elements, got {x.shape}"
                )
        rows = (x.view(self._size, x.numel() // self._size).unbind() for x in tensors)
        return list(zip(*rows, strict=True))


def _reduction(opts: Any) -> Any:
    """Return the reduction of a call's options; the default is a sum.

    Raises:
        ValueError: it is not supported.
    """
    op = dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
    op = getattr(op, "op", op)
    function_of(op)  # raises here, not in the wait
    return op


def _check(*lists: TensorSequence) -> None:
    """Raise ValueError unless tensors are dense and on CPUs."""
    for tensors in lists:
        for x in tensors:
            if not x.is_cpu:
                raise ValueError(f"shm: expected tensors on CPUs, got one on {x.device}; use nccl")
            if x.layout != torch.strided:
                raise ValueError(f"shm: expected dense tensors, got {x.layout}; use gloo")


def _check_tag(tag: int) -> None:
    if tag < 0:
        raise ValueError(f"shm: expected a tag of at least 0, got {tag}")


def _unsupported_error(feature: str) -> NotImplementedError:
    return NotImplementedError(f"shm has no {feature}; use gloo")


def register() -> None:
    """Register the backend with torch.distributed."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            NAME, lambda options, _: SharedMemoryGroup(options), extended_api=True, devices=["cpu"]
        )


register()
