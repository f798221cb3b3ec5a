"""The README of a recipe: what it is, how to start it on one node or several, the plan, what to check first.

Invariant: every command in it counts from the folder where the run starts, and names the recipe's own files.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hf_cp.planning.search import Candidate, Plan

if TYPE_CHECKING:
    from hf_cp.recipes.writer import Recipe

PORT = 29500
PROOF_TOKENS = 16_384  # of the comparison with one process, which must hold that row alone

FILE_ROWS = {
    "accelerate.yaml": "how the processes start",
    "deepspeed.json": "ZeRO; gradients of the processes are added up in fp32",
    "train.yaml": "model, documents, context parallelism, training; every key is an option of the script",
}

TIME_LIMITS = (
    "`timeout_seconds` in `train.yaml` limits the collectives of hf_cp, `ddp_timeout` all others; a lost process ends "
    "the run on every node within them."
)
OTHER_DEGREES = (
    "How a row is split changes only rounding. `--cp_size 1` gives every process whole rows, if they fit; attention "
    "and loss are those of transformers then. Another `--cp_size` that divides the one above shrinks the ring first, "
    "then Ulysses. A step sees (processes / cp) x `gradient_accumulation_steps` rows: keep that product, and the "
    "losses are the same."
)


def readme_file(
    where: str, plan: Plan, choice: Candidate, recipe: Recipe, names: Sequence[str], plan_output: str
) -> str:
    """The whole text.

    Args:
        where (`str`): the recipe's folder, from the folder where runs start.
        plan (`Plan`), choice (`Candidate`): what is run.
        recipe (`Recipe`): title, notes, script.
        names (sequence of `str`): the folder's other files.
        plan_output (`str`): of `recipe.command`.
    """
    files = "\n".join(f"| `{name}` | {FILE_ROWS[name]} |" for name in names)
    notes = "\n\n".join(_filled(note) for note in (batch_note(plan, choice), *recipe.notes))
    return f"""# {recipe.title}

| file | says |
|---|---|
{files}

{notes}

## Start

{_block(launch_lines(where, plan, recipe))}
## First

{_block(check_lines(where, plan, choice, recipe))}
The last one compares the split model with one process, on two layers and your documents; the doctor then finds its
`verify.json`.

## The plan

{_block(f"$ {recipe.command}{chr(10)}{plan_output}")}
It is an estimate. `hf-cp bench` measures links and kernels, `hf-cp plan --measured bench.json` uses them.

## Environment

{_block(environment_lines(plan.cluster.num_nodes))}
{_filled(TIME_LIMITS)}

## Other degrees

{_filled(OTHER_DEGREES)}
"""


def batch_note(plan: Plan, choice: Candidate) -> str:
    """How many rows a step sees."""
    rows, cp = choice.dp_size, choice.config.cp_size
    each = "one row" if rows == 1 else f"{rows} rows"
    return (
        f"{cp} processes share a row (ring {choice.config.ring_degree} x Ulysses {choice.config.ulysses_degree}). One "
        f"optimizer step sees {each} of up to {plan.seq_len:,} tokens; more with `gradient_accumulation_steps`."
    )


def launch_lines(where: str, plan: Plan, recipe: Recipe) -> str:
    """With accelerate, in a SLURM job and, with DeepSpeed, with torchrun."""
    script = f"{shell_word(recipe.script)} {shell_word(f'{where}/train.yaml')}"
    accelerate = f"accelerate launch --config_file {shell_word(f'{where}/accelerate.yaml')}"
    if plan.cluster.num_nodes == 1:
        job = f"srun --nodes 1 --ntasks 1 --gpus-per-node {plan.cluster.gpus_per_node} \\\n    {accelerate}"
        parts = [f"{line} \\\n    {script}" for line in (accelerate, f"# or in a SLURM job\n{job}")]
    else:
        options = f"--machine_rank $NODE_RANK --main_process_ip $HEAD_NODE --main_process_port {PORT}"
        others = (
            "1 on the other" if plan.cluster.num_nodes == 2 else f"1 to {plan.cluster.num_nodes - 1} on the others"
        )
        parts = [
            f"# on every node; NODE_RANK is 0 on HEAD_NODE, {others}\n{accelerate} \\\n    {options} \\\n    {script}",
            _slurm_lines(plan, accelerate, options, script),
        ]
    if recipe.backend == "deepspeed":
        parts.append(_torchrun_lines(where, plan, script))
    return "\n\n".join(parts)


def _slurm_lines(plan: Plan, accelerate: str, options: str, script: str) -> str:
    """One launcher a node; SLURM numbers the nodes in the order of its list, whose first one is the head."""
    cluster = plan.cluster
    return (
        f"# or in a SLURM job\n"
        f"srun --nodes {cluster.num_nodes} --ntasks-per-node 1 --gpus-per-node {cluster.gpus_per_node} bash -c '\n"
        "    export NODE_RANK=$SLURM_NODEID\n"
        '    export HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
        f"    {accelerate} \\\n        {options} \\\n        {script}'"
    )


def _torchrun_lines(where: str, plan: Plan, script: str) -> str:
    cluster = plan.cluster
    place = (
        f"--nnodes {cluster.num_nodes} --node_rank $NODE_RANK --master_addr $HEAD_NODE --master_port {PORT} "
        if cluster.num_nodes > 1
        else ""
    )
    return (
        f"# or with torchrun\ntorchrun {place}--nproc_per_node {cluster.gpus_per_node} \\\n"
        f"    {script} \\\n    --deepspeed {shell_word(f'{where}/deepspeed.json')}"
    )


def check_lines(where: str, plan: Plan, choice: Candidate, recipe: Recipe) -> str:
    """What is worth a minute before the first long run."""
    config, model, data = choice.config, shell_word(recipe.model_name_or_path), shell_word(recipe.dataset)
    gpus = plan.cluster.gpus_per_node
    lora = f" --lora {recipe.lora_r}" if recipe.lora_r else ""
    ulysses = min(config.ulysses_degree, gpus)
    ring = min(config.ring_degree, gpus // ulysses)
    return (
        f"hf-cp doctor --recipe {shell_word(where)}\n"
        f"hf-cp pack --data {data} --tokenizer {model} \\\n"
        f"    --max-tokens {plan.seq_len} --ring {config.ring_degree} --ulysses {config.ulysses_degree}\n"
        f"torchrun --nproc_per_node {ring * ulysses} -m hf_cp verify \\\n"
        f"    --model {model} --data {data} --layers 2{lora} \\\n"
        f"    --max-tokens {min(PROOF_TOKENS, plan.seq_len)} --ring-degree {ring} --ulysses-degree {ulysses} \\\n"
        f"    --output {shell_word(f'{where}/verify.json')}"
    )


def environment_lines(num_nodes: int) -> str:
    """Variables of PyTorch, and on several nodes of NCCL and gloo."""
    lines = ["export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True   # long rows fragment the allocator's memory"]
    if num_nodes > 1:
        lines += [
            "export NCCL_SOCKET_IFNAME=eth0    # the interface that all nodes share",
            "export GLOO_SOCKET_IFNAME=eth0    # the same: before a step the ranks compare their rows over gloo",
            "export NCCL_DEBUG=WARN            # INFO shows which links NCCL found: look for NET/IB, not NET/Socket",
            "export TORCH_FR_BUFFER_SIZE=2000  # keeps the last collectives for a dump when one runs out of time",
        ]
    return "\n".join(lines)


def shell_word(text: str) -> str:
    """One word of a command line, which may stand in the single quotes of a SLURM job too.

    >>> print(shell_word("runs/a"), shell_word("my runs/a"))
    runs/a "my runs/a"

    Raises:
        ValueError: it has a single quote.
    """
    if "'" in text:
        raise ValueError(f"{text} has a single quote, with which no line for SLURM can be written. Rename it.")
    return text if shlex.quote(text) == text else '"' + re.sub(r'([\\"$`])', r"\\\1", text) + '"'


def _filled(text: str) -> str:
    return textwrap.fill(text, 119, break_long_words=False, break_on_hyphens=False)


def _block(text: str) -> str:
    return f"```\n{text}\n```\n"
