"""CPU kernels that bring a decode step near the hardware's floor."""

from cluster.engine.cpu.attention import TreeStep, tree_attention
from cluster.engine.cpu.direct import DirectForward, find_direct
from cluster.engine.cpu.kernels import available
from cluster.engine.cpu.linear import InferenceOnlyError
from cluster.engine.cpu.optimization import Optimization, optimize
from cluster.engine.cpu.stack import PoolCache

__all__ = [
    "DirectForward",
    "InferenceOnlyError",
    "Optimization",
    "PoolCache",
    "TreeStep",
    "available",
    "find_direct",
    "optimize",
    "tree_attention",
]
