"""The engine: an unmodified causal LM, its KV cache, the scheduler and the step loop. torch and transformers only."""

from cluster.engine.async_engine import AsyncEngine, EngineStopped
from cluster.engine.config import EngineConfig
from cluster.engine.engine import Engine, Request, RequestError
from cluster.engine.sequence import FinishReason, RequestOutput, RequestStats, StepDelta

__all__ = [
    "AsyncEngine",
    "Engine",
    "EngineConfig",
    "EngineStopped",
    "FinishReason",
    "Request",
    "RequestError",
    "RequestOutput",
    "RequestStats",
    "StepDelta",
]
