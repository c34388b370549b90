from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest
import torch

from cluster.decoding.params import SamplingParams
from cluster.engine import AsyncEngine, Engine, EngineConfig, EngineStopped, Request, RequestError
from tests.tiny import prompt, tiny_model

LONG = SamplingParams(max_new_tokens=400, ignore_eos=True)


@pytest.fixture
def engine():
    engine = AsyncEngine(Engine(tiny_model(), EngineConfig(kv_cache_gib=0.02, max_sequences=4)))
    yield engine
    engine.close()


async def collect(engine: AsyncEngine, request: Request):
    deltas = [delta async for delta in engine.stream(request)]
    return deltas[-1].output


async def until_idle(engine: AsyncEngine) -> None:
    deadline = time.monotonic() + 30
    while engine.engine.has_work:
        assert time.monotonic() < deadline, "a slot leaked"
        await asyncio.sleep(0.01)


def test_concurrent_streams_equal_the_synchronous_engine(engine):
    requests = [Request(prompt(4 + i, i), SamplingParams(max_new_tokens=20)) for i in range(10)]
    expected = [o.token_ids for o in Engine(tiny_model(), EngineConfig(kv_cache_gib=0.02)).generate(requests)]

    async def run():
        return await asyncio.gather(*(collect(engine, r) for r in requests))

    assert [o.token_ids for o in asyncio.run(run())] == expected


def test_leaving_a_stream_cancels_its_request(engine):
    async def run():
        stream = engine.stream(Request(prompt(5), LONG))
        await anext(stream)
        await stream.aclose()
        await until_idle(engine)

    asyncio.run(run())


def test_cancelled_tasks_leave_no_slot(engine):
    async def run():
        tasks = [asyncio.create_task(collect(engine, Request(prompt(5, i), LONG))) for i in range(12)]
        for i, task in enumerate(tasks):
            await asyncio.sleep(0.002 * (i % 3))
            task.cancel()
        assert all(isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*tasks, return_exceptions=True))
        await until_idle(engine)
        assert (await collect(engine, Request(prompt(5), SamplingParams(max_new_tokens=3)))).token_ids

    asyncio.run(run())


def test_bad_requests_raise_in_their_own_stream_only(engine):
    async def run():
        good = asyncio.create_task(collect(engine, Request(prompt(5), SamplingParams(max_new_tokens=20))))
        with pytest.raises(RequestError, match="empty"):
            await collect(engine, Request([]))
        assert len((await good).token_ids) > 0

    asyncio.run(run())


def test_closing_ends_open_streams_and_refuses_new_ones(engine):
    async def run():
        stream = engine.stream(Request(prompt(5), LONG))
        await anext(stream)
        await asyncio.to_thread(engine.close)
        with pytest.raises(EngineStopped):
            async for _ in stream:
                pass
        with pytest.raises(EngineStopped):
            await collect(engine, Request(prompt(5), LONG))
        assert not engine.is_healthy

    asyncio.run(run())


class Panic(BaseException):
    """What Rust code raises when it panics is no Exception either."""


class Panicking:
    """A constraint that breaks its contract."""

    def mask(self, row: torch.Tensor) -> None:
        raise Panic

    def observe(self, token: int) -> None: ...

    def valid_length(self, path: Sequence[int]) -> int:
        return len(path)

    def forced(self) -> Sequence[int]:
        return ()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_step_loop_that_is_gone(engine):
    async def run():
        good = asyncio.create_task(collect(engine, Request(prompt(5), LONG)))
        bad = asyncio.create_task(collect(engine, Request(prompt(5), LONG, constraint=Panicking())))
        results = await asyncio.wait_for(asyncio.gather(good, bad, return_exceptions=True), 30)
        assert all(isinstance(result, EngineStopped) for result in results)
        assert not engine.is_healthy

    asyncio.run(run())


def test_a_consumer_whose_loop_is_gone_takes_only_itself_down(engine):
    async def begin():
        stream = engine.stream(Request(prompt(5), LONG))
        await anext(stream)
        return stream

    loop = asyncio.new_event_loop()
    abandoned = loop.run_until_complete(begin())
    loop.close()
    asyncio.run(until_idle(engine))
    assert engine.is_healthy
    assert asyncio.run(collect(engine, Request(prompt(5), SamplingParams(max_new_tokens=3)))).token_ids
    del abandoned
