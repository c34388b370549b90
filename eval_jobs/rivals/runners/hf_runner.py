"""Hugging Face ``generate``. Usage: hf_runner.py REQUEST ANSWER (see ``eval_jobs.rivals.running``)."""

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def main(request_file: str, answer_file: str) -> None:
    """Answer the prompts, alone or in padded batches."""
    with open(request_file) as file:
        request = json.load(file)
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=getattr(torch, request["dtype"])).eval()
    at_once = request["at_once"]
    generate(model, request, [request["warm_up"]] * at_once, request["warm_up_tokens"])
    prompts = request["prompts"]
    start = time.perf_counter()
    outputs = []
    for i in range(0, len(prompts), at_once):
        outputs += generate(model, request, prompts[i : i + at_once], request["max_new_tokens"])
    seconds = time.perf_counter() - start
    with open(answer_file, "w") as file:
        json.dump({"token_ids": outputs, "seconds": seconds}, file)


@torch.inference_mode()
def generate(model: Any, request: dict[str, Any], prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Greedy answers to one batch, padded on the left, cut after the token that ended each."""
    stop, width = request["stop_ids"], max(map(len, prompts))
    ids = torch.tensor([[stop[0]] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=tokens,
        do_sample=False,
        repetition_penalty=1.0,
        eos_token_id=stop,
        pad_token_id=stop[0],
    )
    answers = out[:, width:].tolist()
    return [a[: next((i + 1 for i, token in enumerate(a) if token in stop), len(a))] for a in answers]


if __name__ == "__main__":
    main(*sys.argv[1:])
