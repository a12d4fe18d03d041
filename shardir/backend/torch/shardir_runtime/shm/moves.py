"""The steps of the backend `shm`: ranks write tensors, send messages, and read tensors."""

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from torch import Tensor

from .links import INLINE, Links, PeerMessage
from .operations import Operations, Steps
from .reductions import reduce
from .segments import Segment, bytes_of, flats, read, round_up, size_of, views, write

AHEAD = 1 << 25
"""The maximum bytes that a rank has sent and its peers have not read. A rank that has sent more
waits for its readers."""

KINDS = ("", "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "reduce",
         "gather", "scatter", "barrier", "send")  # fmt: skip
"""The kinds of messages by number; 0 is an acknowledgement."""

MessageKey = tuple[int, int]
"""The key of a message between two ranks: 0 and the number of the collective, or the tag plus 1 and
the number of the message with this tag."""

REDUCED = -1
"""The channel, instead of 0, of the message that a part of an all-reduce is reduced."""

PeerTensors = Mapping[int, Sequence[Tensor]]
"""The tensors to send to each rank, or to receive from it. Ranks with the same list share one
copy."""


class GroupMoves(Operations):
    """The steps of a group's operations."""

    def __init__(self, links: Links, seconds: float):
        super().__init__(links, seconds)
        size = len(links.ranks)
        self.others = [(self.index + k) % size for k in range(1, size)]
        self._number = 0
        self._tagged: dict[tuple[str, int, int], int] = {}

    def key(self) -> MessageKey:
        """Return the key of the next collective."""
        self._number += 1
        return 0, self._number

    def tagged_key(self, direction: str, peer: int, tag: int) -> MessageKey:
        """Return the key of the next message with a tag, to or from a rank."""
        counter = direction, peer, tag
        self._tagged[counter] = self._tagged.get(counter, 0) + 1
        return tag + 1, self._tagged[counter]

    def move(
        self, kind: str, key: MessageKey, outgoing: PeerTensors, incoming: PeerTensors,
        copied: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> Steps:  # fmt: skip
        """Send the `outgoing` tensors and receive the `incoming` ones.

        Args:
            copied: pairs (target, source) to copy within this rank.
        """
        segment = self._publish(kind, key, outgoing, incoming)
        for target, source in copied:
            if target.data_ptr() != source.data_ptr():
                target.copy_(source.view_as(target))
        for peer, parts in incoming.items():
            message = yield from self._message(kind, key, peer, bytes_of(parts))
            read(message.memory, message.address, message.offset, parts)
            self.links.acknowledge(peer, message)
        yield from self._wait_for_reader(outgoing, segment)

    def reduce(
        self, kind: str, key: MessageKey, outgoing: PeerTensors, own: Sequence[Tensor],
        outs: Sequence[Tensor], op: Any, peers: Sequence[int],
    ) -> Steps:  # fmt: skip
        """Send the `outgoing` tensors, and reduce `own` and the tensors of `peers` into `outs`."""
        segment = self._publish(kind, key, outgoing, dict.fromkeys(peers, own))
        operands, messages = {self.index: flats(own)}, list[tuple[int, PeerMessage]]()
        for peer in peers:
            message = yield from self._message(kind, key, peer, bytes_of(own))
            operands[peer] = _read(message, own)
            messages.append((peer, message))
        ordered = [operands[k] for k in sorted(operands)]
        for values, out in zip(zip(*ordered, strict=True), outs, strict=True):
            dense = out.contiguous()
            reduce(op, values, dense.view(-1))
            if dense is not out:
                out.copy_(dense)
        for peer, message in messages:
            self.links.acknowledge(peer, message)
        yield from self._wait_for_reader(outgoing, segment)

    def all_reduce(self, x: Tensor, op: Any, key: MessageKey) -> Steps:
        """Reduce a contiguous tensor in place. Each rank reduces one part of it and writes the
        result over its own operand, where the other ranks read it."""
        kind, number, reduced_key = "all-reduce", KINDS.index("all-reduce"), (REDUCED, key[1])
        me, peers, itemsize = self.index, self.others, x.element_size()
        per_rank = round_up(-(-x.numel() * itemsize // (len(peers) + 1))) // itemsize
        parts = [x.view(-1)[k * per_rank : (k + 1) * per_rank] for k in range(len(peers) + 1)]
        segment = self.links.segments.take(size_of(parts), peers)
        write(segment.memory, segment.address, 0, parts)
        starts = [k * per_rank * itemsize for k in range(len(parts))]
        for peer in peers:
            size = bytes_of([parts[peer]])
            self.links.send(peer, number, key, size, segment, starts[peer])
        self.links.check_sent(peers)
        own_part, size = views(segment.memory, starts[me], [parts[me]]), bytes_of([parts[me]])
        operands = {me: own_part[0]}
        for peer in peers:
            message = yield from self._message(kind, key, peer, size)
            operands[peer] = _read(message, [parts[me]])[0]
        reduce(op, [operands[k] for k in sorted(operands)], own_part[0])
        for peer in peers:
            self.links.send(peer, number, reduced_key, size, segment, starts[me])
        self.links.check_sent(peers)
        parts[me].copy_(own_part[0])
        for peer in peers:
            message = yield from self._message(kind, reduced_key, peer, bytes_of([parts[peer]]))
            parts[peer].copy_(_read(message, [parts[peer]])[0])
            self.links.acknowledge(peer, message)

    def _publish(
        self, kind: str, key: MessageKey, outgoing: PeerTensors, incoming: Mapping[int, Any]
    ) -> Segment | None:
        """Send the `outgoing` tensors. Return their segment if the operation ends only once it is
        read: peers from which this rank receives nothing have much unread."""
        links, number = self.links, KINDS.index(kind)
        lists = {id(parts): parts for parts in outgoing.values()}
        sizes = {k: size_of(parts) for k, parts in lists.items()}
        if not sizes or max(sizes.values()) <= INLINE:
            data = {k: bytearray(size) for k, size in sizes.items()}
            for k, parts in lists.items():
                write(data[k], 0, 0, parts)
            for peer, parts in outgoing.items():
                links.send(peer, number, key, bytes_of(parts), data=data[id(parts)])
            links.check_sent(outgoing)
            return None
        urgent = links.segments.unread > AHEAD and any(peer not in incoming for peer in outgoing)
        segment = links.segments.take(sum(sizes.values()), outgoing)
        starts, end = {}, 0
        for k, parts in lists.items():
            write(segment.memory, segment.address, end, parts)
            starts[k], end = end, end + sizes[k]
        for peer, parts in outgoing.items():
            k = id(parts)
            links.send(peer, number, key, bytes_of(parts), segment, starts[k], urgent=urgent)
        links.check_sent(outgoing)
        return segment if urgent else None

    def _wait_for_reader(self, outgoing: PeerTensors, segment: Segment | None) -> Steps:
        """Wait until the sockets have taken all messages, and until the segment is read."""
        for peer in outgoing:
            while peer in self.links.backlog:
                yield from self._wait_for_rank(peer)
        while segment is not None and segment.unread:
            yield from self._wait_for_rank(next(iter(segment.unread)))

    def _message(
        self, kind: str, key: MessageKey, peer: int, size: int
    ) -> Generator[int, None, PeerMessage]:  # fmt: skip
        """Wait for a message of a rank, and return it.

        Raises:
            RuntimeError: its kind or size differs.
        """
        inbox = self.links.inbox[peer]
        while key not in inbox:
            yield from self._wait_for_rank(peer)
        message = inbox.pop(key)
        if (KINDS[message.kind], message.size) != (kind, size):
            raise RuntimeError(
                f"{kind}: expected {size} bytes of rank {self.links.ranks[peer]}, got "
                f"{message.size} of its {KINDS[message.kind]}; the ranks of a group call the same "
                "collectives, with tensors of the same sizes"
            )
        return message

    def _wait_for_rank(self, peer: int) -> Steps:
        """Wait for a rank. Raises RuntimeError where it has ended."""
        if peer in self.links.closed:
            raise self.links.ended_error(peer)
        yield peer


def _read(message: PeerMessage, like: Sequence[Tensor]) -> list[Tensor]:
    """Return flat views of the tensors of a message."""
    return views(message.memory, message.offset, like)
