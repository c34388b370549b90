"""The sockets of retrieval actors. A lookup is asked over a plain connection to the actor's process, not as a Ray call.

A Ray call costs several times what the lookup itself does, and every decode step waits for it. So Ray places, names
and restarts the processes, and tells clients their addresses; the questions go straight to them.

Messages in both directions: 12 bytes of header (size of what follows, number of the question, status), then packed
arrays (`wire`), or a text where the status is not 0. Connections begin with a secret that only Ray hands out.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

HEADER = struct.Struct("<III")
ANSWERED, FAILED = 0, 1
SECRET_BYTES = 32

_MOST_BYTES = 64 << 20  # of a message
_RECEIVE = 1 << 18
_SEND_TIMEOUT_S = 2.0  # for a client that does not take its answers

Message = tuple[int, int, bytes]  # number, status, content


class MessageBuffer:
    """Bytes as they come, and the whole messages in them."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, data: bytes) -> None:
        """Take more bytes."""
        self._bytes += data

    def take(self, size: int) -> bytes | None:
        """The first `size` bytes, when they have come."""
        if len(self._bytes) < size:
            return None
        taken = bytes(self._bytes[:size])
        del self._bytes[:size]
        return taken

    def messages(self) -> Iterator[Message]:
        """Whole messages, which leave the buffer. Raises ConnectionError for one too large to be true."""
        while len(self._bytes) >= HEADER.size:
            size, number, status = HEADER.unpack_from(self._bytes)
            if size > _MOST_BYTES:
                raise ConnectionError("a message is too large")
            if len(self._bytes) < HEADER.size + size:
                return
            content = bytes(self._bytes[HEADER.size : HEADER.size + size])
            del self._bytes[: HEADER.size + size]
            yield number, status, content


@dataclass(slots=True, eq=False)
class _Peer:
    """A connected client; nothing of it is read as a message before it has sent the secret."""

    socket: socket.socket
    buffer: MessageBuffer = field(default_factory=MessageBuffer)
    trusted: bool = False


class LookupServer:
    """Answers messages of any number of clients from one background thread.

    Args:
        host: address to listen on, at a port of the system's choice.
        answer: content of a question to content of its answer; an exception is answered with its text.
    """

    def __init__(self, host: str, answer: Callable[[bytes], bytes]) -> None:
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._answer = answer
        self._listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        threading.Thread(target=self._serve, daemon=True, name="lookups").start()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)

    def _accept(self) -> None:
        accepted, _ = self._listener.accept()
        accepted.settimeout(_SEND_TIMEOUT_S)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(accepted, selectors.EVENT_READ, _Peer(accepted))

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.socket.recv(_RECEIVE)
            if not data:
                raise ConnectionError("the client is gone")
            peer.buffer.add(data)
            if not peer.trusted and not self._admit(peer):
                return
            for number, _, question in peer.buffer.messages():
                self._reply(peer, number, question)
        except OSError:
            self._selector.unregister(peer.socket)
            peer.socket.close()

    def _admit(self, peer: _Peer) -> bool:
        secret = peer.buffer.take(SECRET_BYTES)
        if secret is None:
            return False
        if not hmac.compare_digest(secret, self.secret):
            raise ConnectionError("a client without the secret")
        peer.trusted = True
        return True

    def _reply(self, peer: _Peer, number: int, question: bytes) -> None:
        try:
            status, content = ANSWERED, self._answer(question)
        except Exception as error:  # whatever is wrong with one question, the next one is answered
            status, content = FAILED, f"{type(error).__name__}: {error}".encode()
        peer.socket.sendall(HEADER.pack(len(content), number, status) + content)


class Connection:
    """A client's connection to a server. After connecting it never waits.

    Raises OSError, from every method, when the server is gone.
    """

    def __init__(self, address: tuple[str, int], secret: bytes, timeout_s: float) -> None:
        self._socket = socket.create_connection(address, timeout=timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(secret)
        self._socket.setblocking(False)
        self._buffer = MessageBuffer()

    def fileno(self) -> int:
        """For select and its like."""
        return self._socket.fileno()

    def send(self, number: int, content: bytes) -> None:
        """Ask a question. A server that has not even taken the ones before counts as gone."""
        message = HEADER.pack(len(content), number, 0) + content
        if self._socket.send(message) < len(message):
            raise ConnectionError("the server does not take questions")

    def receive(self) -> list[Message]:
        """All answers that have come whole."""
        while True:
            try:
                data = self._socket.recv(_RECEIVE)
            except BlockingIOError:
                break
            if not data:
                raise ConnectionError("the server is gone")
            self._buffer.add(data)
            if len(data) < _RECEIVE:
                break
        return list(self._buffer.messages())

    def close(self) -> None:
        """Hang up."""
        self._socket.close()
