"""Text, prompt/completion pairs and chats: which tokens, and which of them carry loss."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_cp.data.documents import to_documents

WORDS = ["<unk>", "<s>", "</s>", "user", "assistant", "hi", "there", "good", "day", "bye"]
UNK, BOS, EOS, USER, ASSISTANT, HI, THERE, GOOD, DAY, BYE = range(len(WORDS))
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}assistant {% generation %}{{ m.content }} </s>"
    "{% endgeneration %} {% else %}{{ m.role }} {{ m.content }} {% endif %}{% endfor %}"
)
UNMARKED = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
CHAT = {
    "messages": [
        {"role": "user", "content": "hi there"},
        {"role": "assistant", "content": "good day"},
        {"role": "user", "content": "bye"},
        {"role": "assistant", "content": "bye bye"},
    ]
}


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    made.chat_template = MARKED
    return made


def read(feature: dict, **kwargs) -> tuple[list[int], list[int]]:
    (document,) = to_documents(feature, **kwargs)
    return document.input_ids.tolist(), document.labels.tolist()


def test_text_ends_with_the_end_token(tokenizer) -> None:
    assert read({"text": "hi there"}, tokenizer=tokenizer) == ([HI, THERE, EOS], [HI, THERE, EOS])
    assert read({"text": "hi </s>"}, tokenizer=tokenizer)[0] == [HI, EOS]
    assert to_documents({"text": ""}, tokenizer=tokenizer) == []


def test_completion_carries_the_loss(tokenizer) -> None:
    expected = ([HI, THERE, GOOD, DAY, EOS], [-100, -100, GOOD, DAY, EOS])
    assert read({"prompt": "hi there", "completion": "good day"}, tokenizer=tokenizer) == expected
    (document,) = to_documents({"prompt": "hi there", "completion": "good day"}, tokenizer=tokenizer)
    assert document.shift_labels.tolist() == [-100, GOOD, DAY, EOS, -100]


def test_completion_of_token_lists_needs_no_tokenizer() -> None:
    assert read({"prompt": [1, 2], "completion": [3, 4]}) == ([1, 2, 3, 4], [-100, -100, 3, 4])
    assert read({"prompt": [], "completion": [3, 4]}) == ([3, 4], [3, 4])


def test_chat_carries_loss_on_the_assistant_only(tokenizer) -> None:
    ids, labels = read(CHAT, tokenizer=tokenizer)
    assert ids == [USER, HI, THERE, ASSISTANT, GOOD, DAY, EOS, USER, BYE, ASSISTANT, BYE, BYE, EOS]
    spoken = {4, 5, 6, 10, 11, 12}
    assert labels == [token if at in spoken else -100 for at, token in enumerate(ids)]


def test_chat_with_loss_everywhere(tokenizer) -> None:
    tokenizer.chat_template = UNMARKED
    ids, labels = read(CHAT, tokenizer=tokenizer, assistant_only_loss=False)
    assert ids == labels
    assert len(ids) == 11


def test_template_that_does_not_mark_the_assistant_is_refused(tokenizer) -> None:
    """transformers only logs this and returns an all-zero mask: nothing would be trained."""
    tokenizer.chat_template = UNMARKED
    with pytest.raises(ValueError, match=r"no \{% generation %\} block[\s\S]*assistant_only_loss=False"):
        to_documents(CHAT, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        ({"text": "hi"}, "text in 'text', but there is no tokenizer"),
        (CHAT, "text in 'messages', but there is no tokenizer"),
        ({"prompt": "hi", "completion": "bye"}, "text in 'prompt', but there is no tokenizer"),
        ({"prompt": "hi", "completion": [3]}, "prompt is a str and completion a list"),
        ({"prompt": [1]}, "completion a NoneType"),
        ({"completion": "bye"}, "prompt is a NoneType"),
        ({"prompt": [1, 2], "completion": []}, r"the completion is empty \(the prompt has 2 tokens\)"),
        ({"prompt": CHAT["messages"], "completion": CHAT["messages"]}, "goes under `messages`"),
        ({"text": 3}, "text is a int"),
    ],
)
def test_unreadable_text_is_refused(feature: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_documents(feature)
