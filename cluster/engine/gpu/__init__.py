"""Steps in few shapes, which a GPU replays as CUDA graphs. All but the capture itself runs on any device."""

from cluster.engine.gpu.capture import Capture, capture_for
from cluster.engine.gpu.shapes import StepShape
from cluster.engine.gpu.static_step import ModelCall, StaticStep

__all__ = ["Capture", "ModelCall", "StaticStep", "StepShape", "capture_for"]
