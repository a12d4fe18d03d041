"""The rendezvous of the nodes of a run: torch's over c10d, with the order of --node-rank.

Torch's own rendezvous orders nodes by their names. Here nodes introduce themselves after each
meeting, with their rank and program: a mismatch is an error before a rank starts. The ranks of each
round have a store of their own, without entries of an earlier round.
"""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Protocol

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from shardir.backend.runs import RunError

BACKEND = "shardir"


@dataclass(frozen=True)
class Peer:
    """The introduction of a node to other nodes.

    Args:
        rank: the rank of its command line.
        program, options: digests of its program and options.
    """

    rank: int
    program: str
    options: str


class Member(Protocol):
    """A node, between the rounds and while its ranks run."""

    address: str
    rendezvous: RendezvousHandler
    grows: bool
    """Whether a node waits to take part."""

    def leave(self) -> None:
        """End a round before the next round. Raises the error that ends the run."""

    def join(self, nodes: int) -> Peer:
        """Begin a round with a number of nodes. Returns the introduction of this node."""

    def watch(self, closed: Callable[[], bool]) -> None:
        """Watch the ranks, ten times a second. Raises the error that ends the run."""


class Rendezvous(RendezvousHandler):
    """The rendezvous of a member."""

    def __init__(self, inner: RendezvousHandler, member: Member):
        self._inner, self._member = inner, member
        member.rendezvous = self
        self._ranks: TCPStore | None = None
        self._said: tuple[PrefixStore, int, int] | None = None

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other nodes. Raises RunError where they do not fit."""
        self._member.leave()
        self._ranks = None
        met = self._inner.next_rendezvous()
        own = PrefixStore(BACKEND, met.store)  # the keys of torch's rendezvous stay apart
        node = self._member.join(met.world_size)
        own.set(f"said/{met.rank}", "")
        own.set(f"node/{met.rank}", json.dumps(asdict(node)))
        said = own.multi_get([f"node/{k}" for k in range(met.world_size)])
        nodes = [Peer(**json.loads(text)) for text in said]
        rank = place(nodes, met.rank)
        own.set(f"place/{rank}", str(met.rank))
        self._said = own, met.rank, met.world_size
        address = self._member.address
        if rank == 0:
            self._ranks = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        port = self._ranks.port if self._ranks is not None else None
        store = RendezvousStoreInfo.build(rank, own, address, port)
        return RendezvousInfo(met.store, rank, met.world_size, store)

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        self._member.watch(self._inner.is_closed)
        waiting = self._inner.num_nodes_waiting()
        self._member.grows = waiting > 0
        return waiting

    def share(self, text: str | None) -> list[bytes]:
        """Publish a text to the other nodes, unless it is None. Return the last text of each node,
        in the order of their ranks."""
        if self._said is None:
            return []
        store, index, count = self._said
        if text is not None:
            store.set(f"said/{index}", text)
        places = [int(k) for k in store.multi_get([f"place/{rank}" for rank in range(count)])]
        return store.multi_get([f"said/{k}" for k in places])

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        return self._inner.shutdown()


def place(nodes: list[Peer], index: int) -> int:
    """Return the place of a node in the order of their ranks.

    Raises:
        RunError: two nodes have one rank, or different programs or options.
    """
    ranks = sorted(node.rank for node in nodes)
    for rank, following in pairwise(ranks):
        if rank == following:
            raise RunError(f"--node-rank: expected distinct ranks, got {rank} twice")
    first = min(nodes, key=lambda node: node.rank)
    for node in nodes:
        different = [what for what in ("program", "options")
                     if getattr(node, what) != getattr(first, what)]  # fmt: skip
        if different:
            raise RunError(
                f"expected the same program and options on all nodes, got different "
                f"{' and '.join(different)} on node {node.rank} and node {first.rank}"
            )
    return ranks.index(nodes[index].rank)


def _create(given: RendezvousParameters) -> RendezvousHandler:
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config: dict[str, Any] = dict(given.config)
    member = config.pop("member")
    parameters = RendezvousParameters(
        "c10d", given.endpoint, given.run_id, given.min_nodes, given.max_nodes, given.local_addr,
        **config,
    )  # fmt: skip
    return Rendezvous(get_rendezvous_handler(parameters), member)


rendezvous_handler_registry.register(BACKEND, _create)
