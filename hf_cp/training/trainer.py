"""The stock Trainer on rows that are shared by several processes.

Invariant: loss, gradients, counters and evaluation are those of dp = W / cp_size data-parallel processes with whole
rows. The stock arithmetic already gives that, since the collator shards *before* the Trainer sees a batch: the Trainer
sums the local targets over all W processes (N), asks the model for local_sum / N, multiplies by W, and the backend
averages over W:

    1/W  x  sum over ranks of  grad(local_sum x W / N)   =   grad(sum of all token losses) / N

So little is overridden: loaders, evaluation, counts of rows and tokens, and reports. Without context parallelism
and without packing nothing is overridden: it is the stock Trainer, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import TrainOutput

from hf_cp.config import ContextParallelConfig
from hf_cp.data.collator import DataCollatorForContextParallel
from hf_cp.data.loader import ContextParallelDataLoader
from hf_cp.data.streaming import BUFFER_DOCUMENTS, StreamDataLoader
from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.host import sum_over_world
from hf_cp.distributed.mesh import ContextParallelMesh
from hf_cp.models.patch import context_parallel_state
from hf_cp.sequence.sample import SAMPLE_KEY
from hf_cp.training.backend import check_and_complete
from hf_cp.training.checks import (
    Arguments,
    DataLoading,
    Documents,
    GradientSums,
    Launch,
    OtherParallelism,
    Pairing,
    TrainerClass,
    is_asked_for,
    refuse,
)
from hf_cp.training.deepspeed import keep_grad_norm
from hf_cp.training.evaluation import EvaluationMixin
from hf_cp.training.resume import CheckpointsMixin
from hf_cp.training.rows import make_train_loader
from hf_cp.training.sft import complete_sft, exact_token_count, is_sft, joins_rows_itself
from hf_cp.training.telemetry import TelemetryMixin


class ContextParallelTrainerMixin(EvaluationMixin, CheckpointsMixin, TelemetryMixin):
    """Put before a [`transformers.Trainer`] class: `class MyTrainer(ContextParallelTrainerMixin, SomeTrainer)`.

    With a [`DataCollatorForContextParallel`] that has `max_tokens`, the documents of a dataset are packed into rows of
    at most that many tokens, one row per micro-step and dp rank; `per_device_train_batch_size` must then be 1 (more
    tokens a step: raise `max_tokens` or `gradient_accumulation_steps`; `per_device_eval_batch_size` is not used).
    Without `max_tokens` each row holds `per_device_*_batch_size` features. Of the `dataloader_*` arguments,
    `dataloader_num_workers` and `dataloader_drop_last` apply.

    Args:
        model (`PreTrainedModel` or `PeftModel`): patched by [`apply_context_parallel`] if `cp_size` > 1.
        args (`TrainingArguments`): as for the stock Trainer.
        data_collator (`DataCollatorForContextParallel`): with the same config as the model.
        kwargs: the other arguments of the Trainer, by keyword. `preprocess_logits_for_metrics` is called with parts of
            rows and must treat each token by itself (see [`Predictions`]).

    Attributes:
        max_prediction_bytes (`int`): the most memory that the predictions of an evaluation may take in each process
            (all of them hold the result); 4 GiB.
        stream_buffer_documents (`int`): documents of a streamed `train_dataset` that are packed at a time; 1000.

    Raises:
        ValueError: collator, model and arguments do not fit each other; before anything is communicated or written.
        RuntimeError: other processes run than were launched, or DeepSpeed or FSDP is silently off.
    """

    stream_buffer_documents: int = BUFFER_DOCUMENTS
    _steps_before: int | None = None  # optimizer steps that were done when the latest one began, in train()

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable | None = None,
        **kwargs: Any,
    ):
        self._begin_rows(model=model, args=args, data_collator=data_collator, others=kwargs)
        is_ours = isinstance(data_collator, DataCollatorForContextParallel)
        is_late = is_ours and joins_rows_itself(type(self), args)
        super().__init__(model=model, args=args, data_collator=None if is_late else data_collator, **kwargs)
        if is_ours:
            self._use_collator(data_collator)

    def _begin_rows(self, *, model: Any, args: TrainingArguments | None, data_collator: Any, others: dict) -> None:
        """Checks what the Trainer is given, and notes how rows are split."""
        self._own_rows = _check_request(type(self), model, args, data_collator, others)
        state = context_parallel_state(model) if isinstance(model, nn.Module) else None
        self._cp_config = data_collator.config if self._own_rows else ContextParallelConfig()
        self._cp_comm = None if state is None else state.comm
        self._eval_loaders: list[tuple[Any, ContextParallelDataLoader]] = []  # data set, its loader

    def _use_collator(self, data_collator: DataCollatorForContextParallel) -> None:
        """Run when the Trainer has been built, with whatever it has put around the model."""
        self.data_collator = data_collator
        # it reads columns that no forward() takes: messages, prompt, seq_lengths, ...
        self.args.remove_unused_columns = False
        if self._own_rows and is_sft(type(self)):
            complete_sft(self, max_tokens=data_collator.max_tokens)
            refuse(GradientSums.of_arguments(self.args, self.model, cp_size=self._cp_config.cp_size))
        if context_parallel_state(self.model) is not None:
            self.label_smoother = None  # it shifts labels by one slot of a shard; the patched model smooths itself
        if self._own_rows:
            self._add_observer()

    @property
    def cp_mesh(self) -> ContextParallelMesh:
        """The process groups: the patched model's, or those of whole samples on every process."""
        return self.cp_comm.mesh

    @property
    def cp_comm(self) -> Communicator:
        """What talks to the processes of `cp_mesh`."""
        if self._cp_comm is None:
            self._cp_comm = Communicator(ContextParallelMesh(self._cp_config, device_type=self.args.device.type))
        return self._cp_comm

    def create_accelerator_and_postprocess(self) -> None:
        """As stock, then checks that accelerate runs what was asked for."""
        super().create_accelerator_and_postprocess()
        if self._own_rows:
            self._check_accelerator()

    def _check_accelerator(self) -> None:
        args = self.args
        launch = Launch.of(
            self.accelerator,
            cp_size=self._cp_config.cp_size,
            wants_deepspeed=args.deepspeed_plugin is not None,
            wants_fsdp=args.fsdp_plugin_args is not None or is_asked_for("FSDP"),
        )
        check_and_complete(
            self.accelerator,
            launch,
            micro_batch_size=args.per_device_train_batch_size,
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            gradient_clipping=args.max_grad_norm,
            must_gather=not hasattr(self.model, "get_base_model"),
        )

    # Rows

    def get_train_dataloader(self) -> ContextParallelDataLoader | StreamDataLoader:
        """Rows for this rank: the ranks of a context-parallel group share a row, dp ranks have different ones."""
        if not self._own_rows:
            return super().get_train_dataloader()
        if self.train_dataset is None:
            raise ValueError("There is no train_dataset. Pass train_dataset=... to train.")
        loader = make_train_loader(
            self.train_dataset,
            args=self.args,
            collator=self.data_collator,
            comm=self.cp_comm,
            buffer_documents=self.stream_buffer_documents,
        )
        self._note_train_loader(loader)
        return loader

    def get_eval_dataloader(self, eval_dataset: str | Dataset | None = None) -> ContextParallelDataLoader:
        """Rows in natural order, every document once; where dp ranks run out, they get rows without targets."""
        if not self._own_rows:
            return super().get_eval_dataloader(eval_dataset)
        if eval_dataset is None and self.eval_dataset is None:
            raise ValueError("There is no eval_dataset. Pass eval_dataset=... to evaluate.")
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        elif eval_dataset is None:
            eval_dataset = self.eval_dataset
        # The Trainer's own data sets are packed once. They are told apart as objects: one that has been replaced is
        # packed anew (and the reference that is kept here rules out that another object has taken its place).
        own = self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]
        self._eval_loaders = [pair for pair in self._eval_loaders if any(pair[0] is dataset for dataset in own)]
        for known, loader in self._eval_loaders:
            if known is eval_dataset:
                return loader
        loader = self._make_loader(eval_dataset, features_per_row=self.args.eval_batch_size)
        if any(eval_dataset is dataset for dataset in own):
            self._eval_loaders.append((eval_dataset, loader))
        return loader

    def get_test_dataloader(self, test_dataset: Dataset) -> ContextParallelDataLoader:
        """Rows in natural order, every document once, as for evaluation."""
        if not self._own_rows:
            return super().get_test_dataloader(test_dataset)
        return self._make_loader(test_dataset, features_per_row=self.args.eval_batch_size)

    def _make_loader(self, dataset: Dataset, *, features_per_row: int) -> ContextParallelDataLoader:
        refuse(*Documents.each(dataset))
        args, is_packed = self.args, self.data_collator.max_tokens is not None
        return ContextParallelDataLoader(
            dataset,
            collator=self.data_collator,
            comm=self.cp_comm,
            batch_size=1 if is_packed else features_per_row,
            seed=args.seed if args.data_seed is None else args.data_seed,
            num_workers=args.dataloader_num_workers,
        )

    # Counts: what a user calls a step, a sample and an epoch is that of dp

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Rows (features, if rows are not packed) that one optimizer step sees: micro x accumulation steps x dp."""
        if not self._own_rows:
            return super().get_total_train_batch_size(args)
        return args.train_batch_size * args.gradient_accumulation_steps * self.cp_mesh.dp_size

    def num_examples(self, dataloader: Any) -> int:
        """Rows of an epoch over all dp ranks (features, if rows are not packed); rows without targets do not count."""
        if not isinstance(dataloader, ContextParallelDataLoader):
            return super().num_examples(dataloader)
        manifest = dataloader.manifest
        return len(set(manifest.sources)) if manifest.max_tokens is None else len(manifest.rows)

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """As stock; "non_padding" is known exactly here: every token of a document, once."""
        if not self._own_rows or self.args.include_num_input_tokens_seen != "non_padding":
            return super()._track_num_input_tokens(inputs)
        self.state.num_input_tokens_seen += self._count_tokens(inputs)

    def _count_tokens(self, inputs: dict[str, Any]) -> int:
        """Tokens of documents in this micro-step's rows of all ranks, each once."""
        return sum_over_world([self._count_own_tokens(inputs)], comm=self.cp_comm)[0]

    def _count_own_tokens(self, inputs: dict[str, Any]) -> int:
        """Those of this rank's row; its first rank counts them."""
        sample = inputs.get(SAMPLE_KEY)
        if sample is None:  # a whole row; one of a single token has no target and stands in where rows ran out
            return inputs["input_ids"].numel() if inputs["input_ids"].numel() > 1 else 0
        else:
            collator = self.data_collator.for_rank(self.cp_mesh)
            stands_in = sample.digest == collator.collate(collator.masked_row())[1]
            return 0 if stands_in or self.cp_mesh.cp_rank else sample.layout.num_tokens

    # Training

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """As stock. The returned `training_loss` is the mean over all ranks, as the logged losses are.

        A checkpoint may come from a run with another cp_size and another number of processes, if a step has as many
        rows (see hf_cp/training/checkpoint.py for what is refused).
        """
        if self._own_rows:
            self._prepare_to_train()
        with self._resuming(resume_from_checkpoint) as checkpoint, self._named_errors():
            output = super().train(checkpoint, *args, **kwargs)
        return output._replace(training_loss=output.metrics["train_loss"]) if self._own_rows else output

    def _prepare_to_train(self) -> None:
        if self.model_wrapped is self.model and self.cp_mesh.world_size > 1 and not self.is_fsdp_enabled:
            # An earlier evaluate() has marked the model as prepared: accelerate would then never wrap it in DDP, and
            # every rank would follow its own part of the gradient.
            vars(self.model).pop("_is_accelerate_prepared", None)
        if self.cp_mesh.cp_size > 1:
            # The ranks of a row must not drop the same units of different tokens. Adapters are initialised by now.
            torch.manual_seed(self.args.seed + self.cp_mesh.cp_rank)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """An error inside, of whatever library, gets a note with the rank and the step."""
        self._steps_before = None
        try:
            yield
        except Exception as error:
            if self._own_rows:
                error.add_note(f"hf_cp: {self.cp_mesh.name}, {self._step_name()}; {self.cp_comm.progress}.")
            raise

    def _step_name(self) -> str:
        done = self.state.global_step
        if self._steps_before is None:
            return "before the first optimizer step"
        return f"optimizer step {done + 1}" if self._steps_before == done else f"after optimizer step {done}"

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As stock; a DeepSpeed engine that would not know its gradient norm is told to keep it."""
        if self._own_rows and self.is_deepspeed_enabled:
            keep_grad_norm(self.deepspeed)
        return super().training_step(*args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list, torch.Tensor | int | None]:
        """As stock; an accumulation window without any target has a loss of 0, not of 0 / 0."""
        self._steps_before = self.state.global_step
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        if self._own_rows and num_items is not None:
            num_items = num_items.clamp(min=1)
        return batches, num_items

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As stock; with `label_smoothing_factor`, over the targets inside documents."""
        if self._own_rows and self.args.label_smoothing_factor:
            if self.label_smoother is None:
                inputs = {**inputs, "hf_cp_label_smoothing": self.args.label_smoothing_factor}
            else:  # a whole row: the smoother moves labels by one, so these become our targets
                inputs = {**inputs, "labels": inputs["shift_labels"].roll(1, dims=-1)}
        if not self._own_rows or not is_sft(type(self)) or not self.model.training:
            return super().compute_loss(model, inputs, *args, **kwargs)
        with exact_token_count(self, self._count_tokens(inputs)):
            return super().compute_loss(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As stock, with two numbers set right that the stock loop computes from this rank or from W alone."""
        if self._own_rows:
            if "train_runtime" in logs and "train_loss" in logs:
                # What was not logged yet is this rank's part of the mean, times W: the mean over ranks is exact.
                (total,) = sum_over_world([logs["train_loss"]], comm=self.cp_comm)
                logs["train_loss"] = total / self.cp_mesh.world_size
            self._set_step_rates(logs)
        super().log(logs, start_time)


class ContextParallelTrainer(ContextParallelTrainerMixin, Trainer):
    """[`transformers.Trainer`] with [`ContextParallelTrainerMixin`], for models of [`apply_context_parallel`]."""


def _check_request(
    trainer_class: type, model: Any, args: TrainingArguments | None, collator: Any, others: dict
) -> bool:
    """Raises unless what the Trainer is given fits together; returns whether the rows come from our loader.

    That is so with context parallelism or packing; otherwise the stock Trainer runs.
    """
    state = context_parallel_state(model) if isinstance(model, nn.Module) else None
    is_ours = isinstance(collator, DataCollatorForContextParallel)
    if state is None and not is_ours:
        return False
    config = collator.config if is_ours else state.config
    refuse(TrainerClass(trainer_class, config.cp_size))
    if model is not None:  # model_init is refused below
        refuse(Pairing(collator, None if state is None else state.config))
    is_packed = collator.max_tokens is not None
    if not config.enabled and not is_packed:
        return False
    args = args or TrainingArguments()
    # with adapters to come, SFTTrainer freezes the model's weights; they are looked at after that
    trained = model if others.get("peft_config") is None else None
    refuse(
        OtherParallelism.of(args.parallelism_config),
        DataLoading.of(args.accelerator_config),
        Arguments(args, is_packed, model, is_sft(trainer_class), others),
        GradientSums.of_arguments(args, trained, cp_size=config.cp_size),
        Documents(others.get("train_dataset"), args),
        *Documents.each(others.get("eval_dataset")),
    )
    return True
