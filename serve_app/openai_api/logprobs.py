"""Log-probabilities as the two endpoints report them."""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.openai_api.responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from serve_app.openai_api.token_texts import TokenTexts

_LOWEST = -9999.0  # JSON has no minus infinity; OpenAI writes this


def chat_logprobs(rows: Sequence[dict[int, float]], top: int, texts: TokenTexts) -> ChatLogprobs:
    """For each token {id: log-probability}, its own first: the chat format with ``top`` alternatives."""
    return ChatLogprobs(content=[_token_logprob(row, top, texts) for row in rows], refusal=None)


def _token_logprob(row: dict[int, float], top: int, texts: TokenTexts) -> TokenLogprob:
    own, value = next(iter(row.items()))
    best = sorted(row.items(), key=lambda item: -item[1])[:top]
    alternatives = [
        TopLogprob(token=texts.text(token), logprob=max(lp, _LOWEST), bytes=list(texts.bytes(token)))
        for token, lp in best
    ]
    return TokenLogprob(
        token=texts.text(own),
        logprob=max(value, _LOWEST),
        bytes=list(texts.bytes(own)),
        top_logprobs=alternatives,
    )


def completion_logprobs(
    rows: Sequence[tuple[int, dict[int, float] | None]], offset: int, texts: TokenTexts
) -> CompletionLogprobs:
    """For each token its id and {id: log-probability}, or None for a first token: the completions format.

    ``offset`` is the number of characters in front of the first token.
    """
    tokens = [texts.text(token) for token, _ in rows]
    offsets = []
    for text in tokens:
        offsets.append(offset)
        offset += len(text)
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[None if row is None else max(row[token], _LOWEST) for token, row in rows],
        top_logprobs=[
            None if row is None else {texts.text(token): max(lp, _LOWEST) for token, lp in row.items()}
            for _, row in rows
        ],
        text_offset=offsets,
    )
