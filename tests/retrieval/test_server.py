"""The actors' sockets: questions and answers by number, and clients that are up to no good."""

import socket
import time
from collections.abc import Iterator

import pytest

from cluster.retrieval.server import (
    ANSWERED,
    FAILED,
    HEADER,
    SECRET_BYTES,
    Connection,
    LookupServer,
    Message,
    MessageBuffer,
)


def upper(question: bytes) -> bytes:
    if question == b"bad":
        raise KeyError("no such thing")
    return question.upper()


@pytest.fixture
def server() -> LookupServer:
    return LookupServer("127.0.0.1", upper)


@pytest.fixture
def connection(server: LookupServer) -> Iterator[Connection]:
    made = Connection(server.address, server.secret, 5.0)
    yield made
    made.close()


def answers(connection: Connection, count: int) -> list[Message]:
    """So many answers, in the order they come."""
    found: list[Message] = []
    end = time.monotonic() + 10
    while len(found) < count and time.monotonic() < end:
        found += connection.receive()
    return found


def test_answers_carry_the_numbers_of_their_questions(connection: Connection):
    connection.send(7, b"one")
    connection.send(9, b"x" * 300_000)
    assert answers(connection, 2) == [(7, ANSWERED, b"ONE"), (9, ANSWERED, b"X" * 300_000)]


def test_a_question_that_fails_does_not_end_the_connection(connection: Connection):
    connection.send(1, b"bad")
    connection.send(2, b"good")
    failed, answered = answers(connection, 2)
    assert failed[:2] == (1, FAILED)
    assert b"no such thing" in failed[2]
    assert answered == (2, ANSWERED, b"GOOD")


@pytest.mark.parametrize(
    "content",
    [bytes(SECRET_BYTES) + HEADER.pack(3, 1, 0) + b"one", b"GET / HTTP/1.1\r\nHost: somewhere.else\r\n\r\n"],
)
def test_without_the_secret_there_is_no_answer(server: LookupServer, content: bytes):
    with socket.create_connection(server.address, timeout=10) as stranger:
        stranger.sendall(content)
        assert stranger.recv(100) == b""


def test_a_message_too_large_ends_the_connection(server: LookupServer, connection: Connection):
    with socket.create_connection(server.address, timeout=10) as client:
        client.sendall(server.secret + HEADER.pack(0xFFFFFFFF, 1, 0))
        assert client.recv(100) == b""
    connection.send(1, b"still here")
    assert answers(connection, 1) == [(1, ANSWERED, b"STILL HERE")]


def test_a_client_that_leaves_takes_nobody_with_it(server: LookupServer, connection: Connection):
    gone = Connection(server.address, server.secret, 5.0)
    gone.send(1, b"x" * 1000)
    gone.close()
    connection.send(1, b"next")
    assert answers(connection, 1) == [(1, ANSWERED, b"NEXT")]


def test_messages_come_in_pieces_of_any_size():
    stream = b"".join(HEADER.pack(len(text), number, 0) + text for number, text in enumerate([b"", b"abc", b"d" * 50]))
    for size in (1, 5, 12, 13, len(stream)):
        buffer = MessageBuffer()
        found: list[Message] = []
        for start in range(0, len(stream), size):
            buffer.add(stream[start : start + size])
            found += buffer.messages()
        assert found == [(0, 0, b""), (1, 0, b"abc"), (2, 0, b"d" * 50)]
