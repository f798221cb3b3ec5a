"""Numbers of the planner in docs/: every `$ hf-cp plan` block is run again, tables are computed again.

docs/first-recipe.md is run as a whole in tests/tools/test_recipes_command.py. Blocks that read files of their author's
(lengths, a measurement) cannot be run again.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoConfig

from hf_cp.planning.devices import GIB
from hf_cp.planning.memory import Training, run_memory
from hf_cp.planning.model_names import MODELS
from hf_cp.planning.search import plan_context_parallel
from hf_cp.tools.cli import main
from tests.planning.shapes import LLAMA, LLAMA_SHAPE

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
BLOCKS = [
    (page.stem, command, output)
    for page in sorted(DOCS.glob("*.md"))
    if page.stem != "first-recipe"
    for command, output in re.findall(
        r"^```\n\$ (hf-cp plan .*?)\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL
    )
    if not {"--lengths", "--measured"} & set(shlex.split(command))
]


def lengths() -> list[int]:
    """The 4,000 documents of docs/choosing-degrees.md."""
    return np.random.default_rng(0).integers(500, 2000, 4000).tolist()


def cells(page: str, start: str) -> list[str]:
    """Of the table row that starts so, without its first cell."""
    (line,) = (line for line in (DOCS / f"{page}.md").read_text().splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


@pytest.mark.parametrize(("page", "command", "output"), BLOCKS, ids=[f"{page}: {line}" for page, line, _ in BLOCKS])
def test_blocks_are_what_the_command_prints(page, command, output, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(shlex.split(command)[1:])
    assert capsys.readouterr().out == output


def test_blocks_are_found():
    assert {"choosing-degrees", "tools"} <= {page for page, *_ in BLOCKS}


LORA_TABLE = {
    "all weights, ZeRO-3, `keep_attention`": Training(zero_stage=3),
    "LoRA, ZeRO-2, no checkpointing": Training(zero_stage=2, lora_r=16, checkpointing="none"),
    "LoRA, ZeRO-2, `keep_attention`": Training(zero_stage=2, lora_r=16),
    "LoRA, ZeRO-3, `keep_attention`": Training(lora_r=16),
    "LoRA, ZeRO-3, checkpointing, `keep_attention=False`": Training(lora_r=16, checkpointing="full"),
    "LoRA, ZeRO-3, offload, `mlp_chunk_tokens=4096`": Training(
        lora_r=16, checkpointing="offload", mlp_chunk_tokens=4096
    ),
}


def test_memory_of_lora():
    for name, training in LORA_TABLE.items():
        memory = run_memory(LLAMA_SHAPE, training, world_size=8, local_tokens=16_384, ulysses_degree=8)
        parts = (memory.states, memory.activations, memory.recomputed, memory.logits, memory.buffers, memory.total)
        expected = [f"{part / GIB:.1f}" if part else "–" for part in parts]
        assert cells("lora", name) == expected, f"| {name} | {' | '.join(expected)} |"


def test_longest_documents_of_lora():
    rows = [
        plan_context_parallel(LLAMA, seq_len=131_072, num_gpus=8, cp_size=8, training=training).longest_document
        for training in [*LORA_TABLE.values()][3:4] + [*LORA_TABLE.values()][:1] + [*LORA_TABLE.values()][4:]
    ]
    paragraph = (DOCS / "lora.md").read_text().partition("the longest document that fits")[2].partition("\n\n")[0]
    assert re.findall(r"\d[\d,]{5,}", paragraph) == [f"{row:,}" for row in rows]


def test_packed_samples_and_one_document():
    for start, given in (("one document", [131_072]), ("4,000 documents in 39 samples", lengths())):
        plan = plan_context_parallel(LLAMA, seq_len=131_072, num_gpus=16, cp_size=16, lengths=given)
        assert plan.num_documents == len(given) and plan.num_samples == -(-sum(given) // 131_072)
        tokens = [c.tokens_per_second * c.step.seconds * c.config.cp_size for c in plan.candidates]
        assert tokens == pytest.approx([sum(given) / plan.num_samples] * len(tokens), rel=0.02)
        first = plan.recommended
        assert (first.config.ring_degree, first.config.ulysses_degree) == (2, 8)
        sent = (first.step.ulysses_bytes / GIB, first.step.ring_bytes / GIB)
        speed = (f"{first.step.seconds:.2f}", f"{first.tokens_per_second:,.0f}")
        expected = [*(f"{gib:.1f}" for gib in sent), *speed]
        assert cells("choosing-degrees", start) == expected, f"| {start} | {' | '.join(expected)} |"


def test_traffic_of_a_window():
    config = AutoConfig.from_pretrained(MODELS / "mistral-7b.json")
    plan = plan_context_parallel(config, seq_len=131_072, num_gpus=2, cp_size=2)
    sent = {"+".join(c.engines): round(c.step.ring_bytes / GIB) for c in plan.candidates if c.config.ring_degree == 2}
    text = " ".join((DOCS / "choosing-degrees.md").read_text().split())
    assert sent == {"exchange": 2, "allgather": 32, "p2p": 32}
    assert "2 GiB of K/V and dK/dV in a micro-step with `exchange`, 32 GiB with `allgather` or `p2p`" in text
