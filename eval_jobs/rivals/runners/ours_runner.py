"""This project's engine. Usage: ours_runner.py REQUEST ANSWER (see ``eval_jobs.rivals.running``)."""

import json
import sys
import time

from cluster.decoding.params import SamplingParams, Speculation
from cluster.engine import Engine, EngineConfig, Request
from cluster.models import ModelConfig, load_model


def main(request_file: str, answer_file: str) -> None:
    """Answer the prompts, alone or as many at once as asked for."""
    with open(request_file) as file:
        request = json.load(file)
    loaded = load_model(ModelConfig(model=request["model"], dtype=request["dtype"], device="cpu"))
    at_once, prompts = request["at_once"], request["prompts"]
    engine = Engine(loaded, EngineConfig(max_sequences=at_once, prefix_reuse=False))  # as for the others
    speculation = Speculation(**request["options"])

    def generate(batch: list[list[int]], tokens: int) -> list[list[int]]:
        params = SamplingParams(max_new_tokens=tokens)
        return [output.token_ids for output in engine.generate([Request(p, params, speculation) for p in batch])]

    generate([request["warm_up"]] * at_once, request["warm_up_tokens"])
    limit = request["max_new_tokens"]
    start = time.perf_counter()
    outputs = [answer for i in range(0, len(prompts), at_once) for answer in generate(prompts[i : i + at_once], limit)]
    seconds = time.perf_counter() - start
    with open(answer_file, "w") as file:
        json.dump({"token_ids": outputs, "seconds": seconds}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
