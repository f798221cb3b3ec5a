"""Evaluation of the Trainer on shared and packed rows: the mean over tokens, from sums; predictions and metrics.

The stock loop runs, but what it gathers from the ranks and means over batches is not used: the loss is the sum of all
token losses over the number of targets, and predictions are put together by [`Predictions`].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, denumpify_detensorize

from hf_cp.config import IGNORE_INDEX
from hf_cp.distributed.host import sum_over_world
from hf_cp.training.prediction import MAX_BYTES, Predictions, evaluate_row, make_eval_prediction
from hf_cp.training.sft import is_sft


class EvaluationMixin:
    """The part of [`ContextParallelTrainerMixin`] that evaluates."""

    max_prediction_bytes: int = MAX_BYTES
    _eval_sums: torch.Tensor = torch.zeros(2, dtype=torch.float64)  # token losses and targets on this rank
    _eval_steps: int = 0
    _predictions: Predictions | None = None  # of the evaluation that is running, if logits are asked for

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
        if not self._own_rows:
            return super().evaluation_loop(dataloader, description, prediction_loss_only, **settings)
        self._check_can_evaluate()
        self._eval_sums, self._eval_steps = torch.zeros(2, dtype=torch.float64), len(dataloader)
        if not loss_only:
            self._predictions = Predictions(
                dataloader,
                comm=self.cp_comm,
                preprocess=self.preprocess_logits_for_metrics,
                max_bytes=self.max_prediction_bytes,
                with_losses="loss" in self.args.include_for_metrics,
            )
        try:
            output = super().evaluation_loop(dataloader, description, loss_only, **settings)
        finally:
            predictions, self._predictions = self._predictions, None
        self._set_loss(output.metrics, f"{metric_key_prefix}_loss", dataloader, is_needed=description != "Prediction")
        output = output._replace(num_samples=self.num_examples(dataloader))
        if predictions is None:
            return output
        result = make_eval_prediction(predictions, self.args.include_for_metrics)
        if self.compute_metrics is not None:
            for name, value in denumpify_detensorize(self.compute_metrics(result)).items():
                key = name if name.startswith(f"{metric_key_prefix}_") else f"{metric_key_prefix}_{name}"
                output.metrics[key] = value
        return output._replace(predictions=result.predictions, label_ids=result.label_ids)

    def _set_loss(self, metrics: dict[str, float], key: str, dataloader: Any, *, is_needed: bool) -> None:
        loss_sum, num_targets = sum_over_world(self._eval_sums.tolist(), comm=self.cp_comm)
        metrics.pop(key, None)
        if num_targets:
            metrics[key] = loss_sum / num_targets
        elif is_needed:
            raise ValueError(
                f"The evaluation set of {self.num_examples(dataloader)} rows has no targets: all labels are "
                f"{IGNORE_INDEX}.\n  Evaluate on documents with labels."
            )

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor, None, None]:
        """Adds this rank's sum of token losses and its targets to those of the evaluation, and gathers predictions."""
        if not self._own_rows:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        inputs = {name: self._prepare_input(value) for name, value in inputs.items()}
        shard = None if self._predictions is None else self._predictions.start_step(inputs["labels"])
        num_targets, losses = (inputs["shift_labels"] != IGNORE_INDEX).sum(), None
        with torch.no_grad(), self.compute_loss_context_manager():
            if shard is not None or not is_sft(type(self)):
                loss_sum, losses = evaluate_row(
                    model, inputs, label_smoothing=self.args.label_smoothing_factor, on_logits=shard
                )
            if is_sft(type(self)):  # the loss is of its type, a mean over local targets; it notes its metrics, too
                loss_sum = self.compute_loss(model, inputs) * num_targets
        self._eval_sums = self._eval_sums + torch.stack([loss_sum.double(), num_targets.double()]).cpu()
        if shard is not None:
            self._predictions.finish_step(shard, losses)
        return loss_sum, None, None

    def predict(self, *args: Any, **kwargs: Any) -> PredictionOutput:
        """As stock: predictions and labels in the order of the data set, on every rank; see [`Predictions`]."""
        output = super().predict(*args, **kwargs)
        if self._own_rows:
            self._set_step_rates(output.metrics)
        return output

    def _check_can_evaluate(self) -> None:
        if self.is_deepspeed_enabled and self.deepspeed is None:
            stage = self.accelerator.state.deepspeed_plugin.zero_stage
            missing = f"DeepSpeed (ZeRO stage {stage}): its engine is made"
        elif self.accelerator.is_fsdp2 and not getattr(self.model, "_is_accelerate_prepared", False):
            missing = "FSDP 2: accelerate shards model and optimizer together,"
        else:
            return
        raise RuntimeError(
            f"Evaluation before train() is not supported with {missing} when training begins.\n"
            "  Set eval_on_start=True to evaluate before the first step."
        )

    def _set_step_rates(self, metrics: dict[str, float]) -> None:
        for key in [key for key in metrics if key.endswith("_steps_per_second") and key != "train_steps_per_second"]:
            runtime = metrics.get(key.removesuffix("_steps_per_second") + "_runtime")
            if runtime is not None:  # else it is a user's own number
                metrics[key] = round(self._eval_steps / runtime, 3)
