"""Fine-tuning from a training YAML: long packed samples split over processes, LoRA or all weights.

    accelerate launch --config_file recipes/quickstart-cpu/accelerate.yaml \\
        -m hf_cp train recipes/quickstart-cpu/train.yaml [--max_steps 20 ...]

1. Proof (`proof_tokens`): on a short sample of the training documents the processes together compute the losses,
   gradients and SGD steps that one process computes with the untouched model.
2. Training with `ContextParallelTrainer`.
3. Result (`eval_dataset`): the loss of each held-out document before and after.

Invariant: whatever can be refused is refused in [`set_up`], before anything is written.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

from tqdm.auto import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging

from hf_cp.config import ContextParallelConfig, check_heads, head_counts
from hf_cp.data.collator import DataCollatorForContextParallel
from hf_cp.data.files import load_features
from hf_cp.models.patch import apply_context_parallel
from hf_cp.models.rope import set_rope_parameters
from hf_cp.recipes.held_out import DocumentLosses, LossDrop, document_losses
from hf_cp.recipes.outputs import base_model, summarise, write_outputs
from hf_cp.recipes.settings import TrainSettings, parse_settings
from hf_cp.training.telemetry.callback import ContextParallelCallback
from hf_cp.training.trainer import ContextParallelTrainer
from hf_cp.verify import VerifyReport, verify_context_parallel

__all__ = ["main", "run", "set_up"]

PROOF_FEATURES = 1000  # the proof picks its documents among the first ones


def main(arguments: Sequence[str]) -> int:
    """A whole run; every process calls it.

    Args:
        arguments (sequence of `str`): a training YAML and options, see [`parse_settings`].

    Returns:
        `int`: the exit status: 0 if proof and result hold, 1 if one fails, 2 if the settings do not fit each other.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.disable_progress_bar()  # one bar, that of the training
    warnings.filterwarnings("ignore", category=FutureWarning)  # of libraries about each other
    try:
        trainer, settings = set_up(arguments)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"[rank {_rank()}] {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    status = run(trainer, settings)
    trainer.accelerator.end_training()  # leaves the process group in order
    return status


def set_up(arguments: Sequence[str]) -> tuple[ContextParallelTrainer, TrainSettings]:
    """Everything that can be refused, before anything is written.

    Raises:
        ValueError, RuntimeError, OSError: the settings do not fit each other, the launch, the model or the documents.
    """
    settings, config, args = parse_settings(arguments)
    check_processes(settings, args)
    model_config = AutoConfig.from_pretrained(settings.model_name_or_path)
    if settings.rope_parameters is not None:
        set_rope_parameters(model_config, settings.rope_parameters)
    config = choose_degrees(settings, config, model_config)
    collator = DataCollatorForContextParallel(
        config,
        max_tokens=settings.max_tokens,
        overflow=settings.overflow,
        tokenizer=AutoTokenizer.from_pretrained(settings.model_name_or_path),
    )
    documents = load_features(settings.dataset)
    held_out = load_features(settings.eval_dataset) if settings.eval_dataset else None
    trainer = ContextParallelTrainer(
        model=build_model(settings, model_config, config, args),
        args=args,
        data_collator=collator,
        train_dataset=documents,
        eval_dataset=held_out,
        callbacks=[ContextParallelCallback(record_dir=settings.record_dir, profile_steps=settings.profile_steps)],
    )
    return trainer, settings


def run(trainer: ContextParallelTrainer, settings: TrainSettings) -> int:
    """Proof, training, result; the exit status."""
    mesh, args = trainer.cp_mesh, trainer.args
    plugin = trainer.accelerator.state.deepspeed_plugin
    backend = trainer.accelerator.distributed_type.value + (f" ZeRO-{plugin.zero_stage}" if plugin else "")
    say(
        f"{type(base_model(trainer)).__name__} from {settings.model_name_or_path}\n"
        f"{mesh.world_size} processes ({backend}), {mesh.cp_size} share a sample of up to {settings.max_tokens:,} "
        f"tokens: ring {mesh.ring_size} x Ulysses {mesh.ulysses_size}"
    )
    report = prove(trainer, settings)
    if report is not None and not report.passed:
        return 1
    recorder = Recorder(trainer, settings.eval_every)
    trainer.add_callback(recorder)
    say(f"\nTraining on {len(trainer.train_dataset)} documents in {'bf16' if args.bf16 else settings.model_dtype}")
    if plugin and args.device.type == "cpu":
        say("(the first time, DeepSpeed compiles its CPU communication now: one to two minutes without output)")
    trainer.train(resume_from_checkpoint=resume_point(args))
    recorder.loader.save_manifest(f"{args.output_dir}/packing_manifest.json")
    result = recorder.loss_drop(settings.required_drop_stderr)
    if result is not None:
        say(f"\nResult: {result}")
    summary = {"tokens_per_row": settings.max_tokens} | summarise(trainer, recorder.step_seconds, report, result)
    held_out = {step: losses.mean for step, losses in recorder.evaluations.items()}
    files = write_outputs(trainer, summary, held_out, has_new_rope=settings.rope_parameters is not None)
    say("\n  ".join([f"\nFiles in {args.output_dir}:", *files]))
    return 0 if result is None or result.passed else 1


def say(text: str) -> None:
    """Prints once, above the progress bar."""
    if _rank() == 0:
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()


def _rank() -> int:
    """Of the launcher; asked before there is a process group too."""
    return int(os.environ.get("RANK", "0"))


# What is refused


def check_processes(settings: TrainSettings, args: TrainingArguments) -> None:
    """The launcher must have started what the recipe is written for.

    Raises:
        RuntimeError: another number of processes, or another ZeRO stage.
    """
    stage = args.deepspeed_plugin.zero_stage if args.deepspeed_plugin else None
    if settings.expected_processes not in (None, args.world_size):
        raise RuntimeError(
            f"{settings.expected_processes} processes are expected, but {args.world_size} run together.\n"
            "  Start with `accelerate launch --config_file .../accelerate.yaml`; on CPU the accelerate YAML and "
            "the training YAML both need use_cpu: true."
        )
    if settings.expected_zero_stage not in (None, stage):
        raise RuntimeError(
            f"ZeRO stage {settings.expected_zero_stage} is expected, but the launcher asks for "
            f"{'no DeepSpeed' if stage is None else f'stage {stage}'}.\n"
            "  Use distributed_type: DEEPSPEED in the accelerate YAML, and set the stage in its DeepSpeed JSON."
        )


def choose_degrees(settings: TrainSettings, config: ContextParallelConfig, model_config: Any) -> ContextParallelConfig:
    """Ring and Ulysses degrees for `cp_size` processes: as given, shrunk, or by the model's heads."""
    if settings.cp_size not in (None, config.cp_size):
        ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", settings.cp_size))
        config = config.with_cp_size(settings.cp_size, model_config, ranks_per_node)
    check_heads(*head_counts(model_config), config)
    return config


# The model and its proof


def build_model(
    settings: TrainSettings, model_config: Any, config: ContextParallelConfig, args: TrainingArguments
) -> Any:
    """The model, made context-parallel, with LoRA adapters if asked for; the same weights in every process."""
    set_seed(args.seed)
    name, dtype = settings.model_name_or_path, settings.model_dtype
    model = AutoModelForCausalLM.from_pretrained(name, config=model_config, dtype=dtype)
    if settings.proof_tokens:  # else the backend moves it, FSDP shard by shard
        model = model.to(args.device)
    model = apply_context_parallel(model, config)  # the one line
    if not settings.lora_r:
        return model
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(
        r=settings.lora_r,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, lora)


def choose_proof_documents(documents: Sequence[Any], max_tokens: int) -> list[dict[str, list[int]]]:
    """Whole documents for one short sample: a long one, of up to two thirds of it, and what fits beside it."""
    chosen, room = [], max_tokens
    for document in sorted(documents, key=len, reverse=True):
        if len(document) <= (room if chosen else 2 * max_tokens // 3):
            chosen.append({"input_ids": document.input_ids.tolist(), "labels": document.labels.tolist()})
            room -= len(document)
    if not chosen:
        raise ValueError(
            f"None of the {len(documents)} documents fits into the proof's sample: the shortest has "
            f"{min(map(len, documents)):,} tokens, proof_tokens={max_tokens:,}.\n"
            "  Raise proof_tokens to one and a half times that, or leave the proof out with proof_tokens=0."
        )
    return chosen


def prove(trainer: ContextParallelTrainer, settings: TrainSettings) -> VerifyReport | None:
    """Compares the processes with one process on real documents and prints the comparison."""
    if not settings.proof_tokens or trainer.cp_mesh.cp_size == 1:
        say("Proof: left out" + (" (one process a sample: nothing is split)" if settings.proof_tokens else ""))
        return None
    features = [trainer.train_dataset[i] for i in range(min(PROOF_FEATURES, len(trainer.train_dataset)))]
    documents = trainer.data_collator.prepare(features).documents
    randomised = " (adapters randomised, then put back)" if settings.lora_r else ""
    say(f"\nProof: gradients and SGD steps of the split run against one process{randomised}")
    report = verify_context_parallel(
        trainer.model, choose_proof_documents(documents, settings.proof_tokens), seed=trainer.args.seed
    )
    say(report.table())
    return report


# Training


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
        self.loader = None

    def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
        self.loader = train_dataloader
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
            losses = document_losses(self.trainer.model, loader, comm=self.trainer.cp_comm)
        self.evaluations[step] = losses
        say(f"step {step}: loss {losses.mean:.4f} on {len(losses.sums)} held-out documents")
