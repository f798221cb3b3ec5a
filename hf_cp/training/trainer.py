"""The stock Trainer on samples that are shared by several processes.

Invariant: loss, gradients, counters and evaluation are those of dp = W / cp_size data-parallel processes with whole
samples. The stock arithmetic already gives that, since the collator shards *before* the Trainer sees a batch: the
Trainer sums the local targets over all W processes (N), asks the model for local_sum / N, multiplies by W, and the
backend averages over W:

    1/W  x  sum over ranks of  grad(local_sum x W / N)   =   grad(sum of all token losses) / N

So little is overridden, all of it here; the work is done by objects that the Trainer holds:

| object | does |
|---|---|
| [`SampleLoaders`] (loaders.py) | loaders, counts of tokens |
| [`Evaluation`] (evaluation.py) | one evaluation, with its predictions (prediction.py) |
| [`Checkpoints`] (resume.py) | `hf_cp.json`, what is checked before a run goes on |
| [`RunWatch`] (telemetry/watch.py) | measures the steps, notes where an error was |

An optimizer step is, in order: `get_batch_samples` (its micro-batches, and N), then for every micro-batch
`training_step` (forward, `compute_loss`, backward), the stock update, and `log`.

Without context parallelism and without packing nothing is overridden: it is the stock Trainer, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, TrainOutput

from hf_cp import _compat
from hf_cp.config import ContextParallelConfig
from hf_cp.data.collator import DataCollatorForContextParallel
from hf_cp.data.loader import ContextParallelDataLoader
from hf_cp.data.streaming import BUFFER_DOCUMENTS, StreamDataLoader
from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.host import sum_over_world
from hf_cp.distributed.mesh import ContextParallelMesh
from hf_cp.models.patch import context_parallel_state
from hf_cp.training.backend import check_trainer, prepare_to_train
from hf_cp.training.checks import GradientSums, refuse, refuse_request
from hf_cp.training.deepspeed import keep_grad_norm
from hf_cp.training.evaluation import Evaluation, check_can_evaluate
from hf_cp.training.loaders import SampleLoaders, num_examples
from hf_cp.training.prediction import MAX_BYTES
from hf_cp.training.resume import Checkpoints, check_stock_order
from hf_cp.training.sft import complete_sft, exact_token_count, is_sft, packs_itself
from hf_cp.training.telemetry.callback import ContextParallelCallback
from hf_cp.training.telemetry.watch import RunWatch


class ContextParallelTrainerMixin:
    """Put before a [`transformers.Trainer`] class: `class MyTrainer(ContextParallelTrainerMixin, SomeTrainer)`.

    With a [`DataCollatorForContextParallel`] that has `max_tokens`, the documents of a dataset are packed into samples
    of at most that many tokens, one sample per micro-step and dp rank; `per_device_train_batch_size` must then be 1
    (more tokens a step: raise `max_tokens` or `gradient_accumulation_steps`; `per_device_eval_batch_size` is not
    used). Without `max_tokens` each sample holds `per_device_*_batch_size` features. Of the `dataloader_*` arguments,
    `dataloader_num_workers` and `dataloader_drop_last` apply.

    Args:
        model (`PreTrainedModel` or `PeftModel`): patched by [`apply_context_parallel`] if `cp_size` > 1.
        args (`TrainingArguments`): as for the stock Trainer.
        data_collator (`DataCollatorForContextParallel`): with the same config as the model.
        kwargs: the other arguments of the Trainer, by keyword. `preprocess_logits_for_metrics` is called with parts of
            samples and must treat each token by itself (see [`Predictions`]).

    Attributes:
        max_prediction_bytes (`int`): the most memory that the predictions of an evaluation may take in each process
            (all of them hold the result); 4 GiB.
        stream_buffer_documents (`int`): documents of a streamed `train_dataset` that are packed at a time; 1000.

    Raises:
        ValueError: collator, model and arguments do not fit each other; before anything is communicated or written.
        RuntimeError: other processes run than were launched, or DeepSpeed or FSDP is silently off.
    """

    max_prediction_bytes: int = MAX_BYTES
    stream_buffer_documents: int = BUFFER_DOCUMENTS

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable | None = None,
        **kwargs: Any,
    ):
        self._begin_samples(model=model, args=args, data_collator=data_collator, others=kwargs)
        is_ours = isinstance(data_collator, DataCollatorForContextParallel)
        is_late = is_ours and packs_itself(type(self), args)
        super().__init__(model=model, args=args, data_collator=None if is_late else data_collator, **kwargs)
        if is_ours:
            self._use_collator(data_collator)

    def _begin_samples(self, *, model: Any, args: TrainingArguments | None, data_collator: Any, others: dict) -> None:
        """Checks what the Trainer is given, and makes what it delegates to."""
        is_ours = refuse_request(type(self), model, args, data_collator, others)
        state = context_parallel_state(model) if isinstance(model, nn.Module) else None
        self.cp_config = data_collator.config if is_ours else ContextParallelConfig()
        self._cp_comm = None if state is None else state.comm
        self._loaders = SampleLoaders(self) if is_ours else None  # `None`: it is the stock Trainer
        self._checkpoints = Checkpoints(self)
        self._evaluation: Evaluation | None = None  # the latest one
        self._watch = RunWatch(self)

    def _use_collator(self, data_collator: DataCollatorForContextParallel) -> None:
        """Run when the Trainer has been built, with whatever it has put around the model."""
        self.data_collator = data_collator
        # it reads columns that no forward() takes: messages, prompt, seq_lengths, ...
        self.args.remove_unused_columns = False
        if self._loaders is not None and is_sft(type(self)):
            complete_sft(self, max_tokens=data_collator.max_tokens)
            refuse(GradientSums.of_arguments(self.args, self.model, cp_size=self.cp_config.cp_size))
        if context_parallel_state(self.model) is not None:
            self.label_smoother = None  # it shifts labels by one slot of a shard; the patched model smooths itself
        if self._loaders is not None and self._watch.find_callback() is None:
            self.add_callback(ContextParallelCallback())

    @property
    def cp_mesh(self) -> ContextParallelMesh:
        """The process groups: the patched model's, or those of whole samples on every process."""
        return self.cp_comm.mesh

    @property
    def cp_comm(self) -> Communicator:
        """What talks to the processes of `cp_mesh`."""
        if self._cp_comm is None:
            self._cp_comm = Communicator(ContextParallelMesh(self.cp_config, device_type=self.args.device.type))
        return self._cp_comm

    def create_accelerator_and_postprocess(self) -> None:
        """As stock, then checks that accelerate runs what was asked for."""
        super().create_accelerator_and_postprocess()
        if self._loaders is not None:
            check_trainer(self)

    # Samples

    def get_train_dataloader(self) -> ContextParallelDataLoader | StreamDataLoader:
        """Samples for this rank: the ranks of a context-parallel group share one, dp ranks have different ones."""
        if self._loaders is None:
            return super().get_train_dataloader()
        loader = self._loaders.for_training()
        self._checkpoints.note_loader(loader)
        return loader

    def get_eval_dataloader(self, eval_dataset: str | Dataset | None = None) -> ContextParallelDataLoader:
        """Samples in natural order, every document once; where dp ranks run out, they get dummy samples."""
        if self._loaders is None:
            return super().get_eval_dataloader(eval_dataset)
        return self._loaders.for_evaluation(eval_dataset)

    def get_test_dataloader(self, test_dataset: Dataset) -> ContextParallelDataLoader:
        """Samples in natural order, every document once, as for evaluation."""
        if self._loaders is None:
            return super().get_test_dataloader(test_dataset)
        return self._loaders.in_order(test_dataset)

    # Counts: what a user calls a step, a sample and an epoch is that of dp

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Samples (features, if they are not packed) of an optimizer step: micro x accumulation steps x dp."""
        if self._loaders is None:
            return super().get_total_train_batch_size(args)
        return args.train_batch_size * args.gradient_accumulation_steps * self.cp_mesh.dp_size

    def num_examples(self, dataloader: Any) -> int:
        """Samples of an epoch over all dp ranks (features, if they are not packed), without dummy samples."""
        if not isinstance(dataloader, ContextParallelDataLoader):
            return super().num_examples(dataloader)
        return num_examples(dataloader)

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """As stock; "non_padding" is known exactly here: every token of a document, once."""
        if self._loaders is None or self.args.include_num_input_tokens_seen != "non_padding":
            return super()._track_num_input_tokens(inputs)
        self.state.num_input_tokens_seen += self._count_tokens(inputs)

    def _count_tokens(self, inputs: dict[str, Any]) -> int:
        """Tokens of documents in this micro-step's samples of all ranks, each once."""
        return sum_over_world([self._loaders.count_tokens(inputs)], comm=self.cp_comm)[0]

    # Training

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """As stock. The returned `training_loss` is the mean over all ranks, as the logged losses are.

        A checkpoint may come from a run with another cp_size and another number of processes, if a step has as many
        samples (see hf_cp/training/checkpoint.py for what is refused).
        """
        if self._loaders is None:
            check_stock_order(self, resume_from_checkpoint)
            return super().train(resume_from_checkpoint, *args, **kwargs)
        prepare_to_train(self)
        with self._checkpoints.resuming(resume_from_checkpoint) as folder, self._watch.training():
            output = super().train(folder, *args, **kwargs)
        return output._replace(training_loss=output.metrics["train_loss"])

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list, torch.Tensor | int | None]:
        """As stock: the micro-batches of an optimizer step, and N; without any target the loss is 0, not 0 / 0."""
        with self._watch.fetching():
            batches, num_items = super().get_batch_samples(*args, **kwargs)
        if self._loaders is not None and num_items is not None:
            num_items = num_items.clamp(min=1)
        return batches, num_items

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """A micro-step: as stock (forward, loss x W / N, backward), between two marks of the meter."""
        if self._loaders is None:
            return super().training_step(model, inputs, *args, **kwargs)
        if self.is_deepspeed_enabled:
            keep_grad_norm(self.deepspeed)
        with self._watch.micro_step(inputs, num_tokens=self._loaders.count_tokens(inputs)):
            return super().training_step(model, inputs, *args, **kwargs)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As stock; with `label_smoothing_factor`, over the targets inside documents."""
        if self._loaders is not None and self.args.label_smoothing_factor:
            if self.label_smoother is None:
                inputs = {**inputs, "hf_cp_label_smoothing": self.args.label_smoothing_factor}
            else:  # a whole sample: the smoother moves labels by one, so these become our targets
                inputs = {**inputs, "labels": inputs["shift_labels"].roll(1, dims=-1)}
        if self._loaders is None or not is_sft(type(self)) or not self.model.training:
            return super().compute_loss(model, inputs, *args, **kwargs)
        with exact_token_count(self, self._count_tokens(inputs)):
            return super().compute_loss(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As stock, with the numbers of the run, and two set right that the stock loop has from this rank or W."""
        if self._loaders is not None and "train_runtime" in logs and "train_loss" in logs:
            # What was not logged yet is this rank's part of the mean, times W: the mean over ranks is exact.
            (total,) = sum_over_world([logs["train_loss"]], comm=self.cp_comm)
            logs["train_loss"] = total / self.cp_mesh.world_size
        if self._evaluation is not None:
            self._evaluation.set_step_rates(logs)
        self._watch.add_scalars(logs)
        super().log(logs, start_time)

    # Evaluation

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The mean loss over all targets, every document once, and predictions and metrics as [`Predictions`] says.

        All of it is equal on all ranks and for every cp_size.
        """
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        settings = {"ignore_keys": ignore_keys, "metric_key_prefix": metric_key_prefix}
        if self._loaders is None:
            return super().evaluation_loop(dataloader, description, prediction_loss_only, **settings)
        check_can_evaluate(self)
        self._evaluation = Evaluation(self, dataloader, with_predictions=not loss_only)
        try:
            output = super().evaluation_loop(dataloader, description, loss_only, **settings)
        finally:
            predictions = self._evaluation.take_predictions()
        needs_loss = description != "Prediction"
        return self._evaluation.finish(output, predictions, prefix=metric_key_prefix, needs_loss=needs_loss)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor, None, None]:
        """Adds this rank's sum of token losses and its targets to those of the evaluation, and gathers predictions."""
        if self._loaders is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if self._evaluation is None:
            raise RuntimeError(
                f"prediction_step() of {type(self).__name__} was called outside of evaluate() and predict(): its sums "
                "belong to one of their runs.\n  Call evaluate() or predict()."
            )
        return self._evaluation.step(model, _compat.on_device(self, inputs)), None, None

    def predict(self, *args: Any, **kwargs: Any) -> PredictionOutput:
        """As stock: predictions and labels in the order of the data set, on every rank; see [`Predictions`]."""
        output = super().predict(*args, **kwargs)
        if self._evaluation is not None:
            self._evaluation.set_step_rates(output.metrics)
        return output

    # Checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As stock, with `hf_cp.json` beside the weights; these are whole, also with FSDP's SHARDED_STATE_DICT."""
        if self._loaders is None:
            return super().save_model(output_dir, _internal_call)
        with self._checkpoints.saving(output_dir, is_checkpoint=_internal_call and output_dir is not None):
            super().save_model(output_dir, _internal_call)


class ContextParallelTrainer(ContextParallelTrainerMixin, Trainer):
    """[`transformers.Trainer`] with [`ContextParallelTrainerMixin`], for models of [`apply_context_parallel`]."""
