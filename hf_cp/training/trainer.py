"""The stock Trainer on rows that are shared by several processes.

Invariant: loss, gradients, counters and evaluation are those of dp = W / cp_size data-parallel processes with whole
rows. The stock arithmetic already gives that, since the collator shards *before* the Trainer sees a batch: the Trainer
sums the local targets over all W processes (N), asks the model for local_sum / N, multiplies by W, and the backend
averages over W:

    1/W  x  sum over ranks of  grad(local_sum x W / N)   =   grad(sum of all token losses) / N

So only public methods are overridden: loaders, evaluation, counts of rows, and reports. Without context parallelism
and without packing nothing is overridden: it is the stock Trainer, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, TrainOutput

from hf_cp.config import IGNORE_INDEX, ContextParallelConfig
from hf_cp.data.collator import DataCollatorForContextParallel
from hf_cp.data.loader import ContextParallelDataLoader
from hf_cp.models.patch import context_parallel_state
from hf_cp.parallel.mesh import ContextParallelMesh
from hf_cp.parallel.reduce import sum_over_world
from hf_cp.training.checks import check_launch, check_parallelism_config, is_fsdp_launched
from hf_cp.training.precision import reduce_fsdp_in_fp32
from hf_cp.training.refusals import check_datasets, check_request
from hf_cp.training.zero import check_batch_sizes, check_precision, complete_zero_config

logger = get_logger(__name__)


class ContextParallelTrainerMixin:
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
        kwargs: the other arguments of the Trainer, by keyword.

    Raises:
        ValueError: collator, model and arguments do not fit each other; before anything is communicated or written.
        RuntimeError: other processes run than were launched, or DeepSpeed or FSDP is silently off.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable | None = None,
        **kwargs: Any,
    ):
        self._own_rows = check_request(model=model, args=args, data_collator=data_collator, others=kwargs)
        state = None if model is None else context_parallel_state(model)
        self._cp_config = data_collator.config if self._own_rows else ContextParallelConfig()
        self._cp_mesh = None if state is None else state.mesh
        self._eval_sums = torch.zeros(2, dtype=torch.float64)
        self._eval_steps = 0
        self._eval_loaders: list[tuple[Any, ContextParallelDataLoader]] = []  # data set, its loader
        super().__init__(model=model, args=args, data_collator=data_collator, **kwargs)
        if isinstance(data_collator, DataCollatorForContextParallel):
            # our collator reads columns that no forward() takes: messages, prompt, seq_lengths, ...
            self.args.remove_unused_columns = False
        if self._own_rows:
            logger.info(f"{self.cp_mesh}: {self.get_total_train_batch_size(self.args)} rows per optimizer step.")

    @property
    def cp_mesh(self) -> ContextParallelMesh:
        """The process groups: the patched model's, or those of whole rows on every process."""
        if self._cp_mesh is None:
            self._cp_mesh = ContextParallelMesh(self._cp_config, device_type=self.args.device.type)
        return self._cp_mesh

    def create_accelerator_and_postprocess(self) -> None:
        """As stock, then checks that accelerate runs what was asked for."""
        super().create_accelerator_and_postprocess()
        if not self._own_rows:
            return
        check_parallelism_config(self.accelerator.parallelism_config)
        check_launch(
            self.accelerator,
            cp_size=self._cp_config.cp_size,
            deepspeed_requested=self.args.deepspeed_plugin is not None,
            fsdp_requested=self.args.fsdp_plugin_args is not None or is_fsdp_launched(),
        )
        if self.is_deepspeed_enabled:
            self._check_deepspeed()
        if self.is_fsdp_enabled:
            changed = reduce_fsdp_in_fp32(self.accelerator.state.fsdp_plugin)
            if changed:
                logger.info(f"FSDP mixed precision policy changed: {', '.join(changed)}.")

    def _check_deepspeed(self) -> None:
        config, args = self.accelerator.state.deepspeed_plugin.deepspeed_config, self.args
        micro = args.per_device_train_batch_size
        added = complete_zero_config(config, micro_batch_size=micro, gradient_clipping=args.max_grad_norm)
        if added:
            logger.info(f"DeepSpeed config completed with {', '.join(added)}.")
        check_precision(config, mixed_precision=self.accelerator.mixed_precision)
        check_batch_sizes(
            config,
            micro_batch_size=micro,
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            world_size=self.accelerator.num_processes,
        )

    # Rows

    def get_train_dataloader(self) -> ContextParallelDataLoader:
        """Rows for this rank: the ranks of a context-parallel group share a row, dp ranks have different ones."""
        if not self._own_rows:
            return super().get_train_dataloader()
        if self.train_dataset is None:
            raise ValueError("There is no train_dataset. Pass train_dataset=... to train.")
        return self._make_loader(
            self.train_dataset,
            features_per_row=self.args.train_batch_size,
            shuffle=self.args.train_sampling_strategy == "random",
            drop_last=self.args.dataloader_drop_last,
        )

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

    def _make_loader(
        self, dataset: Dataset, *, features_per_row: int, shuffle: bool = False, drop_last: bool = False
    ) -> ContextParallelDataLoader:
        check_datasets(dataset)
        args, is_packed = self.args, self.data_collator.max_tokens is not None
        return ContextParallelDataLoader(
            dataset,
            collator=self.data_collator,
            mesh=self.cp_mesh,
            batch_size=1 if is_packed else features_per_row,
            shuffle=shuffle,
            seed=args.seed if args.data_seed is None else args.data_seed,
            drop_last=drop_last,
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

    # Training

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """As stock. The returned `training_loss` is the mean over all ranks, as the logged losses are."""
        if not self._own_rows:
            return super().train(*args, **kwargs)
        if self.model_wrapped is self.model and self.cp_mesh.world_size > 1 and not self.is_fsdp_enabled:
            # An earlier evaluate() has marked the model as prepared: accelerate would then never wrap it in DDP, and
            # every rank would follow its own part of the gradient.
            vars(self.model).pop("_is_accelerate_prepared", None)
        if self.cp_mesh.cp_size > 1:
            # The ranks of a row must not drop the same units of different tokens. Adapters are initialised by now.
            torch.manual_seed(self.args.seed + self.cp_mesh.cp_rank)
        output = super().train(*args, **kwargs)
        return output._replace(training_loss=output.metrics["train_loss"])

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As stock, with two numbers set right that the stock loop computes from this rank or from W alone."""
        if self._own_rows:
            if "train_runtime" in logs and "train_loss" in logs:
                # What was not logged yet is this rank's part of the mean, times W: the mean over ranks is exact.
                (total,) = sum_over_world([logs["train_loss"]], mesh=self.cp_mesh)
                logs["train_loss"] = total / self.cp_mesh.world_size
            for key in [key for key in logs if key.endswith("_steps_per_second") and key != "train_steps_per_second"]:
                runtime = logs.get(key.removesuffix("_steps_per_second") + "_runtime")
                if runtime is not None:  # else it is a user's own number
                    logs[key] = round(self._eval_steps / runtime, 3)
        super().log(logs, start_time)

    # Evaluation: the mean over tokens, from sums

    def evaluation_loop(
        self, dataloader: Any, description: str, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> EvalLoopOutput:
        """The mean loss over all targets, every document once; equal on all ranks and for every cp_size."""
        if not self._own_rows:
            return super().evaluation_loop(
                dataloader, description, *args, metric_key_prefix=metric_key_prefix, **kwargs
            )
        self._check_can_evaluate()
        self._eval_sums, self._eval_steps = torch.zeros(2, dtype=torch.float64), len(dataloader)
        output = super().evaluation_loop(dataloader, description, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        loss_sum, num_targets = sum_over_world(self._eval_sums.tolist(), mesh=self.cp_mesh)
        if num_targets == 0:
            raise ValueError(
                f"The evaluation set of {self.num_examples(dataloader)} rows has no targets: all labels are "
                f"{IGNORE_INDEX}.\n  Evaluate on documents with labels."
            )
        output.metrics[f"{metric_key_prefix}_loss"] = loss_sum / num_targets
        return output._replace(num_samples=self.num_examples(dataloader))

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor, None, None]:
        """Adds this rank's sum of token losses and its targets to those of the evaluation."""
        if not self._own_rows:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        inputs = {name: self._prepare_input(value) for name, value in inputs.items()}
        with torch.no_grad(), self.compute_loss_context_manager():
            loss_sum = model(**inputs, num_items_in_batch=1).loss.detach()
        num_targets = (inputs["shift_labels"] != IGNORE_INDEX).sum()
        self._eval_sums += torch.stack([loss_sum.double(), num_targets.double()]).cpu()
        return loss_sum, None, None

    def predict(self, *args: Any, **kwargs: Any) -> PredictionOutput:
        """Stock; refused on shared or packed rows, which have no logits in the order of the data set."""
        if self._own_rows:
            raise ValueError(
                f"predict() is not supported with {self._cp_config}: no rank has the logits of whole rows.\n"
                "  Use evaluate() for the loss, or save the model and predict with the stock Trainer."
            )
        return super().predict(*args, **kwargs)

    def _check_can_evaluate(self) -> None:
        if self.is_deepspeed_enabled and self.deepspeed is None:
            stage = self.accelerator.state.deepspeed_plugin.zero_stage
            raise RuntimeError(
                f"evaluate() before train() is not supported with DeepSpeed (ZeRO stage {stage}): its engine is made "
                "when training begins.\n  Set eval_on_start=True to evaluate before the first step."
            )


class ContextParallelTrainer(ContextParallelTrainerMixin, Trainer):
    """[`transformers.Trainer`] with [`ContextParallelTrainerMixin`], for models of [`apply_context_parallel`]."""
