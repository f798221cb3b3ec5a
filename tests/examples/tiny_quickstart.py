"""A quickstart that fits a test: a random Llama with 3 heads on 1 K/V head, a byte tokenizer, short documents."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<end>"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, and an end-of-text token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def make_model(vocab_size: int) -> LlamaForCausalLM:
    """Like SmolLM2, its 3 heads do not divide over 2 Ulysses ranks."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=1,
            tie_word_embeddings=True,
        )
    )


def write_quickstart(folder: Path) -> list[str]:
    """Writes model and documents; returns the options that scale the recipe down to them."""
    tokenizer = make_tokenizer()
    make_model(len(tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdef", k=4)) for _ in range(6)]
    for name, count in (("train", 16), ("held_out", 7)):
        texts = [" ".join(rng.choices(words, k=rng.randint(3, 45))) for _ in range(count)]
        lines = [json.dumps({"name": f"{name}{i}", "text": text}) for i, text in enumerate(texts)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    settings = {
        "model_name_or_path": folder / "model",
        "dataset": folder / "train.jsonl",
        "eval_dataset": folder / "held_out.jsonl",
        "output_dir": folder / "out",
        "max_tokens": 256,
        "proof_tokens": 192,
        "max_steps": 6,
        "eval_every": 3,
        "learning_rate": 0.02,
        "lora_r": 4,
    }
    return [text for key, value in settings.items() for text in (f"--{key}", str(value))]
