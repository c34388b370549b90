"""Harvesting: the target model answers prompts on a whole cluster, and a corpus is built of its own words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict, Field

from cluster.cli.progress import Progress
from cluster.models import tokenizer_fingerprint
from cluster.prompts import PromptFileError, evenly_spaced, parse_prompt, read_lines
from cluster.retrieval import CorpusError, Manifest
from cluster.retrieval.manifest import MANIFEST_NAME
from cluster.retrieval.storage import Location
from corpus_builder.answering import AnswerSettings
from corpus_builder.answers import ANSWERS_NAME, AnswerFile, open_answers
from corpus_builder.build import build, tokenizer_of
from corpus_builder.documents import TOKEN_FIELD
from corpus_builder.engines import Fields, running_engines, share
from corpus_builder.ray_steps import ray_session
from corpus_builder.requests import BuildRequest, Execution


class HarvestRequest(BaseModel):
    """What to harvest: answers to the prompts of a file, and a corpus of all answers, in the local directory `out`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompts: str
    out: str
    settings: AnswerSettings
    limit: int | None = Field(None, ge=1, description="answer so many prompts, evenly spaced over the file")
    cpus: int | None = Field(None, ge=1, description="CPUs of an engine where there are no GPUs; None: a node's")
    shards: int | None = Field(None, ge=1, le=100_000, description="as for a build")


@dataclass(slots=True)
class Harvest:
    """What became of the prompts.

    Attributes:
        wanted: prompts asked for, all different.
        found: those that had been answered, or had failed, before.
        answered: those answered now, with this many new `tokens`.
        failed: those that cannot be answered as they are, each with the reason.
        lost: those whose engines died again and again; the next harvest tries them anew.
    """

    wanted: int = 0
    found: int = 0
    answered: int = 0
    tokens: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    lost: int = 0

    def count(self, prompt: str, fields: Fields) -> None:
        """Note an answer."""
        if "error" in fields:
            self.failed[prompt] = fields["error"]
        else:
            self.answered += 1
            self.tokens += len(fields[TOKEN_FIELD]) - fields["prompt_tokens"]


def harvest(request: HarvestRequest, execution: Execution) -> tuple[Harvest, Manifest]:
    """Answer the prompts that have no answer in `out` yet, then build the corpus of all answers there.

    Raises CorpusError.
    """
    out = Location.parse(request.out).local
    if out is None:
        raise CorpusError(f"{request.out} is remote; harvest into a local directory, and copy the corpus from there")
    if (out / MANIFEST_NAME).exists() and not (out / ANSWERS_NAME).exists():
        raise CorpusError(f"{request.out} holds a corpus that was not harvested; name another directory")
    prompts = _read_prompts(request.prompts)
    model = request.settings.model.model
    fingerprint = tokenizer_fingerprint(tokenizer_of(model))
    with ray_session(execution.ray_address, execution.workers), open_answers(out) as answers:
        answers.belong_to(request.settings.fixed() | {"tokenizer": fingerprint})
        made = _answer(prompts, request, answers)
        answers.sort({prompt: place for place, prompt in enumerate(prompts)})
        corpus = BuildRequest(
            inputs=(str(answers.path),),
            out=str(out),
            tokenizer=model,
            fields=(TOKEN_FIELD,),
            shards=request.shards,
            overwrite=True,
        )
        return made, build(corpus, execution)


def _read_prompts(path: str) -> dict[str, Fields]:
    """Each different prompt with its id and category; lines without one with their numbers and what is wrong."""
    rows: dict[str, Fields] = {}
    try:
        for number, line in read_lines(path):
            try:
                prompt = parse_prompt(line, f"line {number}", number)
                rows.setdefault(prompt.turns[0], {"id": prompt.id, "category": prompt.category})
            except PromptFileError as error:
                rows[line] = {"id": str(number), "error": str(error)}
    except PromptFileError as error:
        raise CorpusError(str(error)) from error
    return rows


def _answer(prompts: dict[str, Fields], request: HarvestRequest, answers: AnswerFile) -> Harvest:
    """Answer what is missing, with a progress bar."""
    wanted = evenly_spaced(list(prompts), request.limit)
    missing = [prompt for prompt in wanted if prompt not in answers.prompts]
    made = Harvest(wanted=len(wanted), found=len(wanted) - len(missing))
    with Progress(len(wanted), "answer", "prompts", made.found) as progress:
        for prompt, fields in _asked(missing, prompts, request):
            if fields is None:
                made.lost += 1
            else:
                answers.append({"prompt": prompt, **prompts[prompt], **fields})
                made.count(prompt, fields)
            progress.advance(failed=fields is not None and "error" in fields, note=f"{made.tokens:,} tokens")
    return made


def _asked(
    missing: list[str], prompts: dict[str, Fields], request: HarvestRequest
) -> Iterator[tuple[str, Fields | None]]:
    """Missing prompts with what is known of them now."""
    readable = []
    for prompt in missing:
        if "error" in prompts[prompt]:
            yield prompt, {"error": prompts[prompt]["error"]}
        else:
            readable.append(prompt)
    if readable:
        with running_engines(request.settings, request.cpus) as engines:
            yield from share(readable, engines, request.settings.batch)
