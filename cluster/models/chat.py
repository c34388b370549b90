"""Chat templates: messages to token ids, and the token that ends an answer."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from cluster.models.errors import ModelError

_MARK = "\u2603answer\u2603"


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], **template_kwargs: Any
) -> list[int]:
    """Token ids of a conversation, ready for the model's answer.

    `messages` are dicts with `role` and `content` as in the OpenAI API; `template_kwargs` go to the chat
    template (`tools`, `enable_thinking`, `continue_final_message`, …). Raises ModelError when the model has
    no chat template or the template refuses the messages.
    """
    if not tokenizer.chat_template:
        raise ModelError(
            "this model has no chat template, so it takes no chat messages; send a raw prompt "
            "(/v1/completions or --prompt)"
        )
    template_kwargs.setdefault("add_generation_prompt", not template_kwargs.get("continue_final_message"))
    try:
        ids = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=True, return_dict=False, **template_kwargs
        )
    except (TemplateError, TypeError, KeyError, ValueError, AttributeError, IndexError) as error:
        raise ModelError(f"the model's chat template does not accept these messages: {error}") from error
    return list(ids)


def end_of_turn_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The added token that the chat template writes after an answer; empty where there is none."""
    if not tokenizer.chat_template:
        return set()
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _MARK}]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except (TemplateError, TypeError, KeyError, ValueError, AttributeError, IndexError):
        return set()  # a template for other kinds of conversations
    after = text.rpartition(_MARK)[2].lstrip()
    return {index for index, token in tokenizer.added_tokens_decoder.items() if after.startswith(token.content)}
