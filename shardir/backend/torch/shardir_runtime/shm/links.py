"""Messages between the ranks of one machine, over a socket for each pair of ranks.

A message contains its data if they are small, else their position in a segment of the sender
(segments.py). It also acknowledges the segments of the receiver that the sender has read. The first
message about a segment carries its file descriptor.
"""

import array
import json
import mmap
import os
import resource
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple

from .segments import (
    Segment,
    SegmentPool,
    address_of,
    map_segment,
    round_up,
    too_many_files,
)

HEADER = struct.Struct("<BBHIqqQQQ")
"""The header of a message: kind, whether to acknowledge at once, number of acknowledgements,
segment, channel, number, offset, bytes of data, and the bytes of the segment if the message carries
its descriptor. The acknowledged segments and small data follow."""

INLINE = 4096
"""The maximum bytes of data within a message."""

PENDING = 32
"""The maximum number of acknowledgements that wait for another message to carry them."""

LARGEST = HEADER.size + 4 * PENDING + INLINE

ACKNOWLEDGEMENT = 0
"""The kind of a message that only acknowledges segments."""

NO_SEGMENT = 0xFFFFFFFF

WAKE = 1.0
"""The seconds after which a waiting rank wakes up, for example to check its timeout."""

_RIGHTS_SPACE = socket.CMSG_SPACE(4)
_CREDENTIALS = struct.Struct("3i")
_INDEX = struct.Struct("<i")


class PeerMessage(NamedTuple):
    """A received message.

    Attributes:
        memory: the buffer with the data, `size` bytes from `offset` on.
        address: the address of the buffer if it is a segment, else 0.
        segment: the segment to acknowledge, or NO_SEGMENT.
        urgent: whether to acknowledge at once.
    """

    kind: int
    memory: Any
    address: int
    offset: int
    size: int
    segment: int
    urgent: bool


class Links:
    """The sockets of this rank to the other ranks of a group.

    Attributes:
        inbox: by rank: the received messages that no operation has taken, by (channel, number).
        closed: the ranks that have ended, with all their messages received.
        wake: the longest wait in `receive`, in seconds.
        backlog: by rank: the messages that its full socket did not take.

    Args:
        ranks: the global ranks of the group.
        index: the index of this rank in `ranks`.
        seconds: the longest wait for the other ranks.

    Raises:
        RuntimeError: another rank is on another machine, or is late.
    """

    def __init__(self, store: Any, ranks: list[int], index: int, seconds: float):
        _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))  # segments are files
        self.ranks, self.index = ranks, index
        self.segments = SegmentPool()
        others = [k for k in range(len(ranks)) if k != index]
        self.inbox: dict[int, dict[tuple[int, int], PeerMessage]] = {k: {} for k in others}
        self.closed, self._deaf = set[int](), set[int]()  # a deaf rank takes no messages
        self.backlog: dict[int, deque[tuple[bytes, Segment | None]]] = {}
        self._acks: dict[int, list[int]] = {k: [] for k in others}
        self._maps: dict[tuple[int, int], tuple[mmap.mmap, int]] = {}  # with addresses
        self._polled: tuple[Any, dict[int, int]] | None = None
        self.sockets = _meet(store, ranks, index, seconds)
        self.wake = min(WAKE, seconds)
        time_out = struct.pack("ll", int(self.wake), int(self.wake % 1 * 1e6))
        for s in self.sockets.values():
            s.setblocking(True)
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, time_out)
            s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)

    # ---- sending -----------------------------------------------------------------------------

    def send(
        self, peer: int, kind: int, key: tuple[int, int], size: int, segment: Segment | None = None,
        offset: int = 0, data: bytes | bytearray = b"", urgent: bool = False,
    ) -> None:  # fmt: skip
        """Send a message about a segment, or with its data, without waiting; `check_sent` says
        whether the peer had ended."""
        acks, self._acks[peer] = self._acks[peer], []
        number, new = NO_SEGMENT, 0
        if segment is not None:
            number, new = segment.number, 0 if peer in segment.known else segment.size
        text = HEADER.pack(kind, urgent, len(acks), number, *key, offset, size, new)
        if acks:
            text += struct.pack(f"<{round_up(len(acks), 2)}I", *acks, *[0] * (len(acks) % 2))
        if data:
            text += data
        announced = segment if new else None
        if peer in self.backlog:
            self.flush(peer)
        if peer in self.backlog or not self._try_send(peer, text, announced):
            self.backlog.setdefault(peer, deque()).append((text, announced))
            self._polled = None

    def check_sent(self, peers: Iterable[int]) -> None:
        """Raise RuntimeError if one of `peers` had ended before a message reached it.

        A collective calls this after its sends to all ranks: those that have not ended would wait
        for a message that was skipped, and not see the cause.
        """
        for peer in peers:
            if peer in self._deaf:
                raise self.ended_error(peer)

    def _try_send(self, peer: int, text: bytes, announced: Segment | None) -> bool:
        """Send a message; return False where the socket is full. A message to a rank that has
        ended is dropped."""
        try:
            if announced is None:
                self.sockets[peer].send(text, socket.MSG_DONTWAIT)
                return True
            file = array.array("i", [announced.file])
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, file)]
            self.sockets[peer].sendmsg([text], rights, socket.MSG_DONTWAIT)
            announced.known.add(peer)
            if len(announced.known) == len(self.sockets):
                announced.close()
            return True
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            self._deaf.add(peer)
            return True

    def flush(self, peer: int) -> None:
        """Send the backlog of a rank until its socket is full."""
        waiting = self.backlog[peer]
        while waiting and self._try_send(peer, *waiting[0]):
            waiting.popleft()
        if not waiting:
            del self.backlog[peer]
            self._polled = None

    def acknowledge(self, peer: int, message: PeerMessage) -> None:
        """Acknowledge the segment of a message, with the next message to its rank."""
        if message.segment == NO_SEGMENT:
            return
        acks = self._acks[peer]
        acks.append(message.segment)
        if message.urgent or len(acks) >= PENDING:
            self.send(peer, ACKNOWLEDGEMENT, (0, 0), 0)

    # ---- receiving ---------------------------------------------------------------------------

    def receive(self, peer: int, flags: int = 0) -> bool:
        """Receive a message of a rank, within WAKE seconds; return whether there was one."""
        try:
            text, rights, _, _ = self.sockets[peer].recvmsg(
                LARGEST, _RIGHTS_SPACE, flags | socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return False
        except ConnectionResetError:  # it has ended with unread messages; its own are still here
            return self.receive(peer, flags)
        if not text:
            self.closed.add(peer)
            self._polled = None
            return False
        kind, urgent, count, segment, channel, number, offset, size, new = HEADER.unpack_from(text)
        if new:
            self._map(peer, segment, new, rights)
        if count:
            for read in struct.unpack_from(f"<{count}I", text, HEADER.size):
                self.segments.read(read, peer)
        if kind != ACKNOWLEDGEMENT:
            if segment == NO_SEGMENT:
                memory, address = bytearray(text), 0
                offset = HEADER.size + 4 * round_up(count, 2)
            else:
                memory, address = self._maps[peer, segment]
            self.inbox[peer][channel, number] = PeerMessage(
                kind, memory, address, offset, size, segment, bool(urgent)
            )
        return True

    def _map(self, peer: int, segment: int, size: int, rights: Any) -> None:
        """Map a segment of another rank once."""
        if not rights:
            raise too_many_files()
        (_, _, data), *_ = rights
        (file,) = array.array("i", data)
        if (peer, segment) not in self._maps:
            memory = map_segment(file, size)
            self._maps[peer, segment] = memory, address_of(memory)
        os.close(file)

    def ended_error(self, peer: int) -> RuntimeError:
        """Return the error of a wait for a rank that has ended."""
        return RuntimeError(f"connection closed by peer: rank {self.ranks[peer]} has ended")

    def open(self) -> list[int]:
        """Return the ranks that have not ended."""
        return [peer for peer in self.sockets if peer not in self.closed]

    def register(self, poll: Any) -> dict[int, tuple["Links", int]]:
        """Let a poll wait for messages, and for room for the backlog; return the ranks by their
        file descriptors."""
        by_file = dict[int, tuple[Links, int]]()
        for peer in self.open():
            s = self.sockets[peer]
            poll.register(s, select.POLLIN | (select.POLLOUT if peer in self.backlog else 0))
            by_file[s.fileno()] = self, peer
        return by_file

    def ready(self, seconds: float) -> list[int]:
        """Wait up to `seconds`, or `wake`, for sockets to read from or write to; return their
        ranks."""
        if self._polled is None:
            poll = select.poll()
            by_file = self.register(poll)
            self._polled = poll, {file: peer for file, (_, peer) in by_file.items()}
        poll, peers = self._polled
        return [peers[file] for file, _ in poll.poll(1000 * max(0.0, min(seconds, self.wake)))]

    def progress(self, peer: int) -> None:
        """Send the backlog of a rank and receive its next message, without waiting."""
        if peer in self.backlog:
            self.flush(peer)
        self.receive(peer, socket.MSG_DONTWAIT)

    def close(self) -> None:
        """Close all sockets, and release the memory once nothing refers to it."""
        for s in self.sockets.values():
            s.close()
        self.segments.close()
        self._maps.clear()
        for inbox in self.inbox.values():
            inbox.clear()


# ---- meeting -------------------------------------------------------------------------------------


def _meet(store: Any, ranks: list[int], index: int, seconds: float) -> dict[int, socket.socket]:
    """Return connected sockets to the other ranks of a group, by index.

    Each rank connects to the ranks before it, at an abstract address that the kernel chooses: it
    is no file, and ends with its socket.
    """
    sockets: dict[int, socket.socket] = {}
    deadline = time.monotonic() + seconds

    def late_error(k: int) -> RuntimeError:
        return RuntimeError(f"shm timed out: rank {ranks[k]} did not come within {seconds:g} s")

    with _socket(seconds) as listener:
        listener.bind("")
        listener.listen(len(ranks))
        address, machine = listener.getsockname(), _machine()
        store.set(str(index), json.dumps([machine, address.hex()]))
        for k in range(len(ranks)):
            if k == index:
                continue
            try:
                store.wait([str(k)], timedelta(seconds=max(0.001, deadline - time.monotonic())))
            except RuntimeError:
                if time.monotonic() < deadline:
                    raise
                raise late_error(k) from None
            other_machine, name = json.loads(store.get(str(k)))
            if other_machine != machine:
                raise RuntimeError(
                    f"shm: rank {ranks[k]} is on another machine, or in another container, "
                    f"than rank {ranks[index]}; use gloo"
                )
            if k < index:
                sockets[k] = _socket(seconds)
                try:
                    sockets[k].connect(bytes.fromhex(name))
                    sockets[k].send(_INDEX.pack(index))
                except OSError as error:
                    raise RuntimeError(f"shm: rank {ranks[k]}: {error.strerror}") from None
        while missing := [k for k in range(index + 1, len(ranks)) if k not in sockets]:
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                accepted, _ = listener.accept()
                if _user_of(accepted) == os.geteuid():  # any process may connect
                    accepted.settimeout(max(0.001, deadline - time.monotonic()))
                    text = accepted.recv(_INDEX.size)
                    if len(text) == _INDEX.size and _INDEX.unpack(text)[0] in missing:
                        sockets[_INDEX.unpack(text)[0]] = accepted
                        continue
                accepted.close()
            except TimeoutError:
                raise late_error(missing[0]) from None
    return sockets


def _socket(seconds: float) -> socket.socket:
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.settimeout(seconds)
    return s


def _user_of(s: socket.socket) -> int:
    """Return the user ID of the process at the other end."""
    data = s.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(data)[1]


def _machine() -> str:
    """Return an identifier that ranks share if they can connect: of the machine since its boot, and
    of the network namespace, in which abstract addresses are known."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"
