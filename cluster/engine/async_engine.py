"""The engine behind an event loop: one thread steps it, any number of coroutines stream from it."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from cluster.engine.engine import Engine, Request
from cluster.engine.sequence import StepDelta


class EngineStopped(RuntimeError):
    """The engine has been shut down or its step loop has failed; the message says which."""


@dataclass(slots=True)
class _Stream:
    """Where a request's deltas go: an asyncio queue and the loop it belongs to."""

    deltas: asyncio.Queue[StepDelta | EngineStopped]
    loop: asyncio.AbstractEventLoop

    def put(self, item: StepDelta | EngineStopped) -> bool:
        """Hand over an item; False if the consumer's loop is gone."""
        try:
            self.loop.call_soon_threadsafe(self.deltas.put_nowait, item)
        except RuntimeError:  # the loop is closed
            return False
        return True


class AsyncEngine:
    """Streams from an ``Engine`` that a thread of its own steps. All its methods may be called from any event loop."""

    def __init__(self, engine: Engine) -> None:
        """Take over ``engine`` (nobody else may step it) and start the thread."""
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._failure: EngineStopped | None = None
        self._lock = threading.Lock()  # no command may be queued once the failure is known
        self._ids = itertools.count()
        self._thread = threading.Thread(target=self._run, name="engine-step-loop", daemon=True)
        self._thread.start()

    @property
    def engine(self) -> Engine:
        """The engine; read its statistics only."""
        return self._engine

    @property
    def is_healthy(self) -> bool:
        """True while the step loop runs."""
        return self._failure is None

    async def stream(self, request: Request) -> AsyncIterator[StepDelta]:
        """What each step adds to the request; the last delta has ``output`` set.

        Leaving the iteration early cancels the request: its slot is free within a step.

        Raises:
            RequestError: the request cannot be served as it is.
            EngineStopped: the engine stops before the request is finished.
        """
        request_id = request.request_id or f"stream-{next(self._ids)}-{id(self):x}"
        request = replace(request, request_id=request_id)
        stream = _Stream(asyncio.Queue(), asyncio.get_running_loop())
        added = self._call(lambda: self._add(request, stream))
        try:
            await asyncio.wrap_future(added)
            while True:
                delta = await stream.deltas.get()
                if isinstance(delta, EngineStopped):
                    raise delta
                yield delta
                if delta.output is not None:
                    return
        finally:
            self._commands.put(lambda: self._drop(request_id, stream))

    def close(self) -> None:
        """Stop the thread; streams still open end with ``EngineStopped``."""
        self._commands.put(None)
        self._thread.join()

    def _call(self, function: Callable[[], None]) -> Future[None]:
        """Run a function on the engine's thread between two steps."""
        future: Future[None] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._failure is not None:
                    raise self._failure
                function()
                future.set_result(None)
            except BaseException as error:  # a panic in Rust code, such as a tokenizer's, is no Exception
                future.set_exception(error)

        with self._lock:
            if self._failure is None:
                self._commands.put(run)
                return future
        run()
        return future

    def _add(self, request: Request, stream: _Stream) -> None:
        request_id = self._engine.add(request)
        self._streams[request_id] = stream

    def _drop(self, request_id: str, stream: _Stream) -> None:
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            self._engine.abort(request_id)

    def _run(self) -> None:
        try:
            while self._obey():
                for delta in self._engine.step():
                    self._deliver(delta)
            self._stop(EngineStopped("the engine has been shut down"))
        except BaseException as error:  # whatever it is, nobody must wait for a thread that is gone
            self._stop(EngineStopped(f"the step loop failed: {error!r}"))
            raise

    def _deliver(self, delta: StepDelta) -> None:
        stream = self._streams.get(delta.request_id)
        if stream is not None and not stream.put(delta):
            self._drop(delta.request_id, stream)
        elif delta.output is not None:
            self._streams.pop(delta.request_id, None)

    def _obey(self) -> bool:
        """Run queued commands, waiting for one if there is nothing to step; False to stop."""
        while True:
            try:
                command = self._commands.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _stop(self, reason: EngineStopped) -> None:
        with self._lock:
            self._failure = reason
        for stream in self._streams.values():
            stream.put(reason)
        self._streams.clear()
        while True:  # whoever queued a command before noticing gets its answer from here
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            if command is not None:
                command()
