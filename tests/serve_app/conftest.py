"""A tiny random Llama with a byte-level tokenizer, and the HTTP application over an engine here."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cluster.engine import AsyncEngine, Engine, EngineConfig, StepDelta
from cluster.models import LoadedModel, ModelConfig, load_model, load_tokenizer
from serve_app.generation import Event, GenerationRequest
from serve_app.openai_api.app import create_app
from serve_app.openai_api.served_model import ServedModel
from serve_app.runner import Runner
from serve_app.settings import Limits, ModelSettings

T = TypeVar("T")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("t", "h")]
CHAT_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token, and a few merges are."""
    tokens = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in MERGES]
    backend = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SPECIAL[0])
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[1:]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """Directory of a model that answers any prompt with gibberish, the same for the same prompt."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = tiny_tokenizer()
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tiny_loaded(tiny_model) -> LoadedModel:
    return load_model(ModelConfig(model=str(tiny_model), dtype="float32", device="cpu"))


class NobodyWatches:
    """An observer of nothing."""

    def started(self) -> object:
        return None

    def advanced(self, mark: object, delta: StepDelta) -> None:
        pass

    def left(self, mark: object) -> None:
        pass


class LocalBackend:
    """The replica's code in this process, without Serve between."""

    def __init__(self, engine: Engine) -> None:
        self.engine = AsyncEngine(engine)
        self._runner = Runner(self.engine, NobodyWatches())

    def is_ready(self) -> bool:
        return self.engine.is_healthy

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[list[Event], None]:
        async with aclosing(self._runner.run(request)) as batches:
            async for batch in batches:
                yield batch


@pytest.fixture(scope="module")
def backend(tiny_loaded):
    backend = LocalBackend(Engine(tiny_loaded, EngineConfig(kv_cache_gib=0.01, max_sequences=8)))
    yield backend
    backend.engine.close()


def make_app(backend, tiny_model, limits=None, keys=frozenset()):
    """The application over a backend, its model called ``tiny``."""
    settings = ModelSettings(model=str(tiny_model))
    model = ServedModel(settings, load_tokenizer(str(tiny_model)), backend)
    return create_app([model], limits or Limits(), keys)


@pytest.fixture(scope="module")
def app(backend, tiny_model):
    return make_app(backend, tiny_model)


_LOOP = asyncio.new_event_loop()
threading.Thread(target=_LOOP.run_forever, name="test-loop", daemon=True).start()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the one loop that all tests share, as all requests to a server do."""
    return asyncio.run_coroutine_threadsafe(coroutine, _LOOP).result(timeout=120)


@asynccontextmanager
async def http_client(app):
    """An HTTP client of an application in this process."""
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://app", timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def call(app):
    """Send one request to the application."""

    def send(method: str, path: str, **options) -> httpx.Response:
        async def request():
            async with http_client(app) as client:
                return await client.request(method, path, **options)

        return run(request())

    return send


@pytest.fixture(scope="module")
def post(call):
    """Post a JSON body."""

    def send(path: str, body: object) -> httpx.Response:
        return call("POST", path, json=body)

    return send
