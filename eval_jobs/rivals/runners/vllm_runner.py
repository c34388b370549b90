"""vLLM. Usage: vllm_runner.py REQUEST ANSWER (see ``eval_jobs.rivals.running``)."""

import json
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams


def main(request_file: str, answer_file: str) -> None:
    """Answer the prompts, alone or as many at once as asked for."""
    with open(request_file) as file:
        request = json.load(file)
    at_once, prompts = request["at_once"], request["prompts"]
    llm = LLM(
        model=request["model"],
        dtype=request["dtype"],
        max_num_seqs=at_once,
        max_model_len=max(map(len, prompts)) + request["max_new_tokens"],
        enable_prefix_caching=False,  # no prompt is to profit from the one before it
        disable_log_stats=True,
        seed=0,
        **request["options"],
    )
    generate(llm, request, [request["warm_up"]] * at_once, request["warm_up_tokens"])
    start = time.perf_counter()
    outputs = []
    for i in range(0, len(prompts), at_once):
        outputs += generate(llm, request, prompts[i : i + at_once], request["max_new_tokens"])
    seconds = time.perf_counter() - start
    with open(answer_file, "w") as file:
        json.dump({"token_ids": outputs, "seconds": seconds}, file)


def generate(llm: LLM, request: dict[str, Any], prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Greedy answers to prompts at once."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, stop_token_ids=request["stop_ids"], detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    main(*sys.argv[1:])
