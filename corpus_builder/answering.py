"""The actor that answers a harvest's prompts: the target model and an engine in a process of their own."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from cluster.decoding.params import SamplingParams, Speculation
from cluster.engine import AsyncEngine, Engine, EngineConfig, Request, RequestError, RequestOutput
from cluster.models import LoadedModel, ModelConfig, ModelError, load_model, render_chat

# Tokens of the prompt that documents begin with: an n-gram's worth, so that a corpus knows how answers begin. More of
# the prompt makes a corpus larger and, measured, no better (docs/corpus.md, Figures).
_LEAD = 4


class AnswerSettings(BaseModel):
    """How prompts are answered."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: ModelConfig
    sampling: SamplingParams
    speculation: Speculation
    batch: int = Field(ge=1, description="prompts that an engine answers at once")

    def fixed(self) -> dict[str, Any]:
        """What answers depend on."""
        return {"model": self.model.model, "dtype": self.model.dtype, "sampling": self.sampling.model_dump(mode="json")}


class AnsweringActor:
    """Answers any number of prompts at once; those beyond the batch wait in its engine.

    The model is loaded at the first use, so that its errors are those of a call, also after a restart.
    """

    def __init__(self, settings: AnswerSettings) -> None:
        self._settings = settings
        self._running: tuple[LoadedModel, AsyncEngine] | None = None

    async def load(self) -> None:
        """Get ready. Raises ModelError."""
        self._engine()

    async def answer(self, prompt: str) -> dict[str, Any]:
        """The answer as fields of a row: `token_ids` of the document, `prompt_tokens` of which are the prompt's last
        ones, `text` and `finish_reason`; or an `error`, where the prompt cannot be answered as it is.
        """
        loaded, engine = self._engine()
        sampling, speculation = self._settings.sampling, self._settings.speculation
        try:
            ids = render_chat(loaded.tokenizer, [{"role": "user", "content": prompt}])
            output = await _output(engine, Request(ids, sampling, speculation))
        except (ModelError, RequestError) as error:
            return {"error": str(error)}
        lead = ids[-_LEAD:]
        return {
            "prompt_tokens": len(lead),
            "token_ids": lead + output.token_ids,
            "text": output.text,
            "finish_reason": output.finish_reason.value,
        }

    def _engine(self) -> tuple[LoadedModel, AsyncEngine]:
        if self._running is None:
            loaded = load_model(self._settings.model)
            config = EngineConfig(max_sequences=self._settings.batch)
            self._running = loaded, AsyncEngine(Engine(loaded, config))
        return self._running


async def _output(engine: AsyncEngine, request: Request) -> RequestOutput:
    async for delta in engine.stream(request):
        if delta.output is not None:
            return delta.output
    raise AssertionError("a stream ends with its output")
