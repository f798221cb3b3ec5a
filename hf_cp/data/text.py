"""Text, prompt/completion pairs and chats become token lists with a label for every token.

The tokenizer is the user's own: this module imports none. Loss falls on everything in `text`, on the completion only
in `prompt`/`completion`, and on the assistant's tokens in `messages`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hf_cp.config import IGNORE_INDEX

TEXT_COLUMNS = ("messages", "prompt", "completion", "text")
_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def tokenize_feature(
    columns: Mapping[str, Any], *, tokenizer: Any, assistant_only_loss: bool, name: str
) -> tuple[Sequence[int], Sequence[int] | None]:
    """Token ids and labels (`None`: the ids) of a feature that has no `input_ids`.

    Args:
        columns (`Mapping`): one of `messages`, `prompt` with `completion`, or `text`.
        tokenizer: a Hugging Face tokenizer, or `None` if the feature holds token lists.
        assistant_only_loss (`bool`): loss on the assistant's tokens of `messages` only.
        name (`str`): how error messages call the feature.

    Raises:
        ValueError: the tokenizer is missing, a part is missing or of the wrong type, or the chat template does not
            mark the assistant's tokens.
    """
    if "messages" in columns:
        return _from_chat(columns, _need(tokenizer, "messages", name), assistant_only_loss, name)
    if "prompt" in columns or "completion" in columns:
        return _from_completion(columns, tokenizer, name)
    if not isinstance(columns["text"], str):
        raise ValueError(f"{name}: text is a {type(columns['text']).__name__}; it needs a string.")
    return _encode(_need(tokenizer, "text", name), columns["text"]), None


def _need(tokenizer: Any, column: str, name: str) -> Any:
    if tokenizer is None:
        raise ValueError(
            f"{name} has text in {column!r}, but there is no tokenizer.\n"
            "  Pass DataCollatorForContextParallel(..., tokenizer=tokenizer), or tokenize the data set to input_ids."
        )
    return tokenizer


def _encode(tokenizer: Any, text: str, **kwargs: Any) -> list[int]:
    """Token ids, ended by the end-of-text token (a document without one never teaches the model to stop)."""
    if not text:
        return []
    ids = list(tokenizer(text, verbose=False, **kwargs)["input_ids"])  # verbose: samples may exceed model_max_length
    end = tokenizer.eos_token_id
    return ids if end is None or ids[-1:] == [end] else [*ids, end]


def _from_completion(columns: Mapping[str, Any], tokenizer: Any, name: str) -> tuple[list[int], list[int]]:
    """The two parts are tokenized apart, so that the prompt has the tokens that it has at inference."""
    prompt, completion = columns.get("prompt"), columns.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        tokenizer = _need(tokenizer, "prompt", name)
        prompt = list(tokenizer(prompt, verbose=False)["input_ids"]) if prompt else []
        if prompt[-1:] == [tokenizer.eos_token_id]:  # added by some tokenizers; here the text goes on
            prompt.pop()
        completion = _encode(tokenizer, completion, add_special_tokens=False)
    elif not _is_token_list(prompt) or not _is_token_list(completion):
        raise ValueError(
            f"{name}: prompt is a {type(prompt).__name__} and completion a {type(completion).__name__}; both must be "
            "strings or both token lists.\n  A conversation goes under `messages`."
        )
    if len(prompt) and not len(completion):
        raise ValueError(
            f"{name}: the completion is empty (the prompt has {len(prompt)} tokens), so nothing would be learnt from "
            "it. Remove such features."
        )
    return [*map(int, prompt), *map(int, completion)], [IGNORE_INDEX] * len(prompt) + [*map(int, completion)]


def _is_token_list(value: Any) -> bool:
    if value is None or isinstance(value, str | Mapping) or not hasattr(value, "__len__"):
        return False
    return len(value) == 0 or not isinstance(value[0], str | Mapping)


def _from_chat(
    columns: Mapping[str, Any], tokenizer: Any, assistant_only_loss: bool, name: str
) -> tuple[list[int], list[int] | None]:
    messages, tools = columns["messages"], columns.get("tools")
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ValueError(f"{name}: messages is a {type(messages).__name__}; it needs a list of role/content mappings.")
    if not messages:
        return [], None
    if assistant_only_loss:
        _check_marks_assistant(tokenizer, tools, name)
    encoded = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=assistant_only_loss
    )
    ids = list(encoded["input_ids"])
    if not assistant_only_loss:
        return ids, None
    return ids, [
        token if spoken else IGNORE_INDEX for token, spoken in zip(ids, encoded["assistant_masks"], strict=True)
    ]


def _check_marks_assistant(tokenizer: Any, tools: Any, name: str) -> None:
    """Without a generation block transformers returns an all-zero mask, and nothing would be trained."""
    template = tokenizer.get_chat_template(tools=tools)
    if not _GENERATION_BLOCK.search(template):
        raise ValueError(
            f"{name}: loss on the assistant's tokens was asked for, but the tokenizer's chat template does not mark "
            "them (it has no {% generation %} block).\n"
            "  Put {% generation %}...{% endgeneration %} around the assistant's text in tokenizer.chat_template, or "
            "pass assistant_only_loss=False."
        )
    if not tokenizer.is_fast:
        raise ValueError(
            f"{name}: {type(tokenizer).__name__} cannot tell which characters a token covers, so the assistant's "
            "tokens are unknown.\n  Use the fast tokenizer, or pass assistant_only_loss=False."
        )
