"""Fine-tuning on packed long rows that are split over processes, LoRA or all weights, with a proof and a result.

    accelerate launch --config_file recipes/quickstart-cpu/accelerate.yaml \\
        examples/finetune.py recipes/quickstart-cpu/train.yaml [--max_steps 20 ...]

The YAML file fills the arguments below, `ContextParallelConfig` and `transformers.TrainingArguments`; options on the
command line win. Another recipe, the same script: that is a run on 16 GPUs. `lora_r: 0` trains all weights, `cp_size:
1` gives every process whole rows, `record_dir` keeps what `hf-cp report` reads.

1. Proof (`proof_tokens`): on a short row of the training documents the processes together compute the losses,
   gradients and SGD steps that one process computes with the untouched model.
2. Training with `ContextParallelTrainer`.
3. Result (`eval_dataset`): the loss of each held-out document before and after.

The exit status is 0 if both hold, 1 if one fails, 2 if the settings do not fit each other (nothing is written then).
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import yaml
from tqdm.auto import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging

from hf_cp import (
    ContextParallelCallback,
    ContextParallelConfig,
    ContextParallelTrainer,
    DataCollatorForContextParallel,
    apply_context_parallel,
    verify_context_parallel,
)
from hf_cp.config import check_heads, head_counts
from hf_cp.models.rope import set_rope_parameters
from hf_cp.recipes.held_out import DocumentLosses, LossDrop, document_losses
from hf_cp.recipes.summary import peak_memory_gib, plot_losses
from hf_cp.verify import VerifyReport

RANK = int(os.environ.get("RANK", "0"))
PROOF_FEATURES = 1000  # the proof picks its documents among the first ones
TEXT_SUFFIXES = (".txt", ".md", ".py", ".rst")


@dataclass(frozen=True)
class ScriptArguments:
    """What the other two argument groups do not cover."""

    model_name_or_path: str = field(metadata={"help": "Folder or hub name of a model of a supported family."})
    dataset: str = field(
        metadata={"help": "JSONL file, folder of text files, or folder of a saved Hugging Face dataset."}
    )
    eval_dataset: str | None = field(default=None, metadata={"help": "Held-out documents, in the same forms."})
    model_dtype: str = field(default="float32", metadata={"help": "Type that the weights are loaded in."})
    rope_parameters: dict | str | None = field(
        default=None, metadata={"help": "RoPE for longer documents, as in a model's config; rope_theta is kept."}
    )
    max_tokens: int = field(default=4096, metadata={"help": "Tokens in one row; documents are packed into rows."})
    overflow: str = field(default="error", metadata={"help": "Longer documents: error, truncate, split or drop."})
    cp_size: int | None = field(
        default=None,
        metadata={
            "help": "Processes that share one row: the degrees are chosen by the model's heads; given ones shrink, "
            "the ring first. 1: every process has whole rows."
        },
    )
    expected_processes: int | None = field(default=None, metadata={"help": "Refuse another number of processes."})
    expected_zero_stage: int | None = field(default=None, metadata={"help": "Refuse another ZeRO stage, or none."})
    lora_r: int = field(default=16, metadata={"help": "Rank of the adapters on all linear layers; 0: all weights."})
    lora_alpha: int = field(default=32, metadata={"help": "Adapters are scaled by lora_alpha / lora_r."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout in front of the adapters."})
    proof_tokens: int = field(
        default=0, metadata={"help": "Longest row of the proof before training; 0 leaves it out."}
    )
    eval_every: int = field(default=0, metadata={"help": "Steps between evaluations; 0 is before and after only."})
    required_drop_stderr: float = field(
        default=0.0, metadata={"help": "Standard errors by which the held-out loss must fall; 0 asks for nothing."}
    )
    record_dir: str | None = field(
        default=None, metadata={"help": "Folder for a record of every rank and step, which `hf-cp report` reads."}
    )
    profile_steps: list[int] = field(
        default_factory=list, metadata={"help": "Optimizer steps, from 1, of which traces go to record_dir."}
    )

    def __post_init__(self):
        if isinstance(self.rope_parameters, str):  # a command line
            object.__setattr__(self, "rope_parameters", json.loads(self.rope_parameters))


def say(text: str) -> None:
    """Prints once, above the progress bar."""
    if RANK == 0:
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()


# Settings


def parse_arguments(arguments: Sequence[str]) -> tuple[ScriptArguments, ContextParallelConfig, TrainingArguments]:
    """A YAML file, if the first argument is one, and options that win over it."""
    arguments = list(arguments)
    if arguments and not arguments[0].startswith("--"):
        arguments[:1] = read_recipe(Path(arguments[0]))
    parser = HfArgumentParser((ScriptArguments, ContextParallelConfig, TrainingArguments), allow_abbrev=False)
    return parser.parse_args_into_dataclasses(arguments)


def read_recipe(path: Path) -> list[str]:
    """The keys of a YAML file as options of a command line."""
    options = []
    for key, value in yaml.safe_load(path.read_text()).items():
        if value is None:
            continue
        values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
        options += [f"--{key}", *(str(v).lower() if isinstance(v, bool) else str(v) for v in values)]
    return options


def choose_degrees(script: ScriptArguments, config: ContextParallelConfig, model_config: Any) -> ContextParallelConfig:
    """Ring and Ulysses degrees for `cp_size` processes: as given, shrunk, or by the model's heads."""
    if script.cp_size not in (None, config.cp_size):
        ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", script.cp_size))
        config = config.with_cp_size(script.cp_size, model_config, ranks_per_node)
    check_heads(*head_counts(model_config), config)
    return config


def check_processes(script: ScriptArguments, args: TrainingArguments) -> None:
    """The launcher must have started what the recipe is written for."""
    stage = args.deepspeed_plugin.zero_stage if args.deepspeed_plugin else None
    if script.expected_processes not in (None, args.world_size):
        raise RuntimeError(
            f"{script.expected_processes} processes are expected, but {args.world_size} run together.\n"
            "  Start with `accelerate launch --config_file .../accelerate.yaml`; on CPU the accelerate YAML and "
            "the training YAML both need use_cpu: true."
        )
    if script.expected_zero_stage not in (None, stage):
        raise RuntimeError(
            f"ZeRO stage {script.expected_zero_stage} is expected, but the launcher asks for "
            f"{'no DeepSpeed' if stage is None else f'stage {stage}'}.\n"
            "  Use distributed_type: DEEPSPEED in the accelerate YAML, and set the stage in its DeepSpeed JSON."
        )


def load_documents(path: str) -> Sequence[Any]:
    """Features with `text`, `input_ids`, `messages`, or `prompt` and `completion`: what the collator reads."""
    source = Path(path)
    if source.is_file():
        return [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
    if (source / "dataset_info.json").exists():
        from datasets import load_from_disk

        return load_from_disk(path)
    files = sorted(file for file in source.rglob("*") if file.suffix in TEXT_SUFFIXES)
    if not files:
        raise ValueError(
            f"{path!r} is no JSONL file, and as a folder it holds 0 text files ({', '.join(TEXT_SUFFIXES)}) and no "
            "saved dataset.\n  Give one of these; of a saved dataset with splits, the folder of one split."
        )
    return [{"name": str(file.relative_to(source)), "text": file.read_text(encoding="utf-8")} for file in files]


# Model, proof


def build_model(
    script: ScriptArguments, model_config: Any, config: ContextParallelConfig, args: TrainingArguments
) -> Any:
    """The model, made context-parallel, with LoRA adapters if asked for; the same weights in every process."""
    set_seed(args.seed)
    name, dtype = script.model_name_or_path, script.model_dtype
    model = AutoModelForCausalLM.from_pretrained(name, config=model_config, dtype=dtype)
    if script.proof_tokens:  # else the backend moves it, FSDP shard by shard
        model = model.to(args.device)
    model = apply_context_parallel(model, config)  # the one line
    return add_adapters(model, script) if script.lora_r else model


def add_adapters(model: Any, script: ScriptArguments) -> Any:
    """LoRA on all linear layers of the decoder."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(
        r=script.lora_r,
        lora_alpha=script.lora_alpha,
        lora_dropout=script.lora_dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, lora)


def base_model(trainer: ContextParallelTrainer) -> Any:
    """The Hugging Face model, without adapters around it."""
    model = trainer.model
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def choose_proof_documents(documents: Sequence[Any], max_tokens: int) -> list[dict[str, list[int]]]:
    """Whole documents for one short row: a long one, of up to two thirds of it, and what fits beside it."""
    chosen, room = [], max_tokens
    for document in sorted(documents, key=len, reverse=True):
        if len(document) <= (room if chosen else 2 * max_tokens // 3):
            chosen.append({"input_ids": document.input_ids.tolist(), "labels": document.labels.tolist()})
            room -= len(document)
    if not chosen:
        raise ValueError(
            f"None of the {len(documents)} documents fits into the proof's row: the shortest has "
            f"{min(map(len, documents)):,} tokens, proof_tokens={max_tokens:,}.\n"
            "  Raise proof_tokens to one and a half times that, or leave the proof out with proof_tokens=0."
        )
    return chosen


def prove(trainer: ContextParallelTrainer, script: ScriptArguments) -> VerifyReport | None:
    """Compares the processes with one process on real documents and prints the comparison."""
    if not script.proof_tokens or trainer.cp_mesh.cp_size == 1:
        say("Proof: left out" + (" (one process a row: nothing is split)" if script.proof_tokens else ""))
        return None
    features = [trainer.train_dataset[i] for i in range(min(PROOF_FEATURES, len(trainer.train_dataset)))]
    documents = trainer.data_collator.prepare(features).documents
    randomised = " (adapters randomised, then put back)" if script.lora_r else ""
    say(f"\nProof: gradients and SGD steps of the split run against one process{randomised}")
    report = verify_context_parallel(
        trainer.model, choose_proof_documents(documents, script.proof_tokens), seed=trainer.args.seed
    )
    say(report.table())
    return report


# Training, result


def resume_point(args: TrainingArguments) -> str | bool | None:
    """`resume_from_checkpoint`: a folder, or `true` for the last checkpoint in output_dir. The Trainer itself only
    looks at what train() is given."""
    named = args.resume_from_checkpoint
    return {"true": True, "false": None}.get(str(named).lower(), named)


class Recorder(TrainerCallback):
    """Evaluates held-out documents before, during and after training, and times the steps.

    It evaluates the model in the precision that it is trained in: DeepSpeed converts it when training begins.
    """

    def __init__(self, trainer: ContextParallelTrainer, eval_every: int):
        self.trainer, self.eval_every = trainer, eval_every
        self.evaluations: dict[int, DocumentLosses] = {}
        self.step_seconds: list[float] = []
        self.train_loader = None

    def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
        self.train_loader = train_dataloader
        self._evaluate(state.global_step)

    def on_step_begin(self, args, state, control, **kwargs):
        self._began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.step_seconds.append(time.perf_counter() - self._began)
        if self.eval_every and state.global_step % self.eval_every == 0:
            self._evaluate(state.global_step)

    def on_train_end(self, args, state, control, **kwargs):
        self._evaluate(state.global_step)

    def loss_drop(self, required_stderr: float) -> LossDrop | None:
        """From the first to the last evaluation; `None` without held-out documents.

        They are one and the same if no step was taken, as in a run that resumes at its end.
        """
        losses = list(self.evaluations.values())
        return LossDrop(losses[0], losses[-1], required_stderr=required_stderr) if losses else None

    def _evaluate(self, step: int) -> None:
        if self.trainer.eval_dataset is None or step in self.evaluations:
            return
        loader = self.trainer.get_eval_dataloader()
        with self.trainer.accelerator.autocast():  # under bf16=True the weights are fp32, the computation is not
            losses = document_losses(self.trainer.model, loader, mesh=self.trainer.cp_mesh)
        self.evaluations[step] = losses
        say(f"step {step}: loss {losses.mean:.4f} on {len(losses.sums)} held-out documents")


def summarise(
    trainer: ContextParallelTrainer,
    script: ScriptArguments,
    recorder: Recorder,
    report: VerifyReport | None,
    result: LossDrop | None,
) -> dict[str, Any]:
    """The numbers of `summary.json`. All ranks must call it."""
    config, plugin = trainer.cp_mesh.config, trainer.accelerator.state.deepspeed_plugin
    seconds = recorder.step_seconds[1:] or recorder.step_seconds  # the first step also warms up
    return {
        "cp_size": config.cp_size,
        "ring_degree": config.ring_degree,
        "ulysses_degree": config.ulysses_degree,
        "processes": trainer.args.world_size,
        "zero_stage": plugin.zero_stage if plugin else None,
        "tokens_per_row": script.max_tokens,
        "loss_first_step_cp1": report and report.loss_cp1,
        "loss_first_step_cpN": report and report.loss_cpN,
        "grad_norm_cp1": report and report.grad_norm_cp1,
        "grad_norm_cpN": report and report.grad_norm_cpN,
        "worst_gradient_relative_error": report and report.worst_gradient_relative_error,
        "proof": report and json.loads(report.to_json()),
        "eval_loss_before": result and result.before.mean,
        "eval_loss_after": result and result.after.mean,
        "eval_loss_drop_stderr": result and result.stderr,
        "eval_documents": result and len(result.before.sums),
        "steps": trainer.state.global_step,
        "seconds_per_step": sum(seconds) / max(1, len(seconds)),
        "peak_memory_gib": peak_memory_gib(trainer.cp_mesh),  # of the whole process, proof included
    }


def write_outputs(trainer: ContextParallelTrainer, recorder: Recorder, summary: dict, *, new_rope: bool) -> None:
    """Adapter or model, summary, packing manifest and loss curve; each file has one writer."""
    folder = Path(trainer.args.output_dir)
    trainer.save_model(str(folder))
    recorder.train_loader.save_manifest(folder / "packing_manifest.json")
    if not trainer.is_world_process_zero():
        return
    is_adapter = base_model(trainer) is not trainer.model
    if is_adapter and new_rope:  # the adapter belongs to the context that it was trained in
        base_model(trainer).config.save_pretrained(folder)
    if not is_adapter:  # the folder is a whole model
        trainer.data_collator.tokenizer.save_pretrained(folder)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    say(f"\nFiles in {folder}:")
    say(f"  {'the trained LoRA adapter' if is_adapter else 'the trained model'}, summary.json, packing_manifest.json")
    draw_losses(folder / "loss_curve.png", trainer, recorder)


def draw_losses(path: Path, trainer: ContextParallelTrainer, recorder: Recorder) -> None:
    """The loss curve, where matplotlib is installed."""
    training = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    held_out = {step: losses.mean for step, losses in recorder.evaluations.items()}
    try:
        plot_losses(path, training=training, held_out=held_out)
    except ImportError:
        say(f"  no {path.name}: matplotlib is not installed (pip install matplotlib)")
    else:
        say(f"  {path.name}")


def set_up(arguments: Sequence[str]) -> tuple[ContextParallelTrainer, ScriptArguments]:
    """Everything that can be refused, before anything is written."""
    script, config, args = parse_arguments(arguments)
    check_processes(script, args)
    model_config = AutoConfig.from_pretrained(script.model_name_or_path)
    if script.rope_parameters is not None:
        set_rope_parameters(model_config, script.rope_parameters)
    config = choose_degrees(script, config, model_config)
    collator = DataCollatorForContextParallel(
        config,
        max_tokens=script.max_tokens,
        overflow=script.overflow,
        tokenizer=AutoTokenizer.from_pretrained(script.model_name_or_path),
    )
    documents = load_documents(script.dataset)
    held_out = load_documents(script.eval_dataset) if script.eval_dataset else None
    callback = ContextParallelCallback(record_dir=script.record_dir, profile_steps=script.profile_steps)
    trainer = ContextParallelTrainer(
        model=build_model(script, model_config, config, args),
        args=args,
        data_collator=collator,
        train_dataset=documents,
        eval_dataset=held_out,
        callbacks=[callback],
    )
    return trainer, script


def run(trainer: ContextParallelTrainer, script: ScriptArguments) -> int:
    """Proof, training, result; the exit status."""
    mesh, args = trainer.cp_mesh, trainer.args
    plugin = trainer.accelerator.state.deepspeed_plugin
    backend = trainer.accelerator.distributed_type.value + (f" ZeRO-{plugin.zero_stage}" if plugin else "")
    say(
        f"{type(base_model(trainer)).__name__} from {script.model_name_or_path}\n"
        f"{mesh.world_size} processes ({backend}), {mesh.cp_size} share a row of up to {script.max_tokens:,} tokens: "
        f"ring {mesh.ring_size} x Ulysses {mesh.ulysses_size}"
    )
    report = prove(trainer, script)
    if report is not None and not report.passed:
        return 1
    recorder = Recorder(trainer, script.eval_every)
    trainer.add_callback(recorder)
    say(f"\nTraining on {len(trainer.train_dataset)} documents in {'bf16' if args.bf16 else script.model_dtype}")
    if plugin and args.device.type == "cpu":
        say("(the first time, DeepSpeed compiles its CPU communication now: one to two minutes without output)")
    trainer.train(resume_from_checkpoint=resume_point(args))
    result = recorder.loss_drop(script.required_drop_stderr)
    if result is not None:
        say(f"\nResult: {result}")
    summary = summarise(trainer, script, recorder, report, result)
    write_outputs(trainer, recorder, summary, new_rope=script.rope_parameters is not None)
    return 0 if result is None or result.passed else 1


def main() -> int:
    logging.disable_progress_bar()  # one bar, that of the training
    warnings.filterwarnings("ignore", category=FutureWarning)  # of libraries about each other
    try:
        trainer, script = set_up(sys.argv[1:])
    except (ValueError, RuntimeError) as error:
        print(f"[rank {RANK}] {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    status = run(trainer, script)
    trainer.accelerator.end_training()  # leaves the process group in order
    return status


if __name__ == "__main__":
    sys.exit(main())
