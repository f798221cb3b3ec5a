"""Evaluation of the Trainer on shared and packed samples: the mean over tokens, from sums; predictions and metrics.

The stock loop runs, but what it gathers from the ranks and means over batches is not used: the loss is the sum of all
token losses over the number of targets, and predictions are put together by [`Predictions`].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput, denumpify_detensorize

from hf_cp import _compat
from hf_cp.config import IGNORE_INDEX
from hf_cp.data.loader import ContextParallelDataLoader
from hf_cp.distributed.host import sum_over_world
from hf_cp.training.loaders import num_examples
from hf_cp.training.prediction import Predictions, evaluate_sample, make_eval_prediction
from hf_cp.training.sft import evaluate_sft, is_sft


class Evaluation:
    """One evaluation of a Trainer: step by step, then its result.

    Args:
        trainer (`Trainer`): a [`ContextParallelTrainerMixin`].
        loader (`ContextParallelDataLoader`): of the samples.
        with_predictions (`bool`): whether they, and metrics of them, are asked for.
    """

    def __init__(self, trainer: Trainer, loader: ContextParallelDataLoader, *, with_predictions: bool):
        self._trainer, self._loader, self.num_steps = trainer, loader, len(loader)
        self._sums = torch.zeros(2, dtype=torch.float64)  # token losses and targets on this rank
        self._predictions: Predictions | None = None
        if with_predictions:
            self._predictions = Predictions(
                loader,
                comm=trainer.cp_comm,
                preprocess=trainer.preprocess_logits_for_metrics,
                max_bytes=trainer.max_prediction_bytes,
                with_losses="loss" in trainer.args.include_for_metrics,
            )

    def step(self, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        """Adds this rank's sum of token losses and its targets, and gathers predictions; returns that sum."""
        trainer = self._trainer
        shard = None if self._predictions is None else self._predictions.start_step(batch["labels"])
        num_targets = (batch["shift_labels"] != IGNORE_INDEX).sum()
        with torch.no_grad(), trainer.compute_loss_context_manager():
            if is_sft(type(trainer)):
                loss_sum, losses = evaluate_sft(trainer, model, batch, on_logits=shard)
            else:
                smoothing = trainer.args.label_smoothing_factor
                loss_sum, losses = evaluate_sample(model, batch, label_smoothing=smoothing, on_logits=shard)
        self._sums = self._sums + torch.stack([loss_sum.double(), num_targets.double()]).cpu()
        if shard is not None:
            self._predictions.finish_step(shard, losses)
        return loss_sum

    def take_predictions(self) -> Predictions | None:
        """Once: they may be large, and the Trainer keeps its latest evaluation."""
        predictions, self._predictions = self._predictions, None
        return predictions

    def finish(
        self, output: EvalLoopOutput, predictions: Predictions | None, *, prefix: str, needs_loss: bool
    ) -> EvalLoopOutput:
        """The result, out of that of the stock loop; equal on all ranks and for every cp_size.

        Raises:
            ValueError: a loss is needed, but nothing has a label.
        """
        trainer, loader = self._trainer, self._loader
        loss_sum, num_targets = sum_over_world(self._sums.tolist(), comm=trainer.cp_comm)
        output.metrics.pop(f"{prefix}_loss", None)
        if num_targets:
            output.metrics[f"{prefix}_loss"] = loss_sum / num_targets
        elif needs_loss:
            raise ValueError(
                f"The evaluation set of {num_examples(loader)} samples has no targets: all labels are "
                f"{IGNORE_INDEX}.\n  Evaluate on documents with labels."
            )
        output = output._replace(num_samples=num_examples(loader))
        if predictions is None:
            return output
        result = make_eval_prediction(predictions, trainer.args.include_for_metrics)
        if trainer.compute_metrics is not None:
            for name, value in denumpify_detensorize(trainer.compute_metrics(result)).items():
                output.metrics[name if name.startswith(f"{prefix}_") else f"{prefix}_{name}"] = value
        return output._replace(predictions=result.predictions, label_ids=result.label_ids)

    def set_step_rates(self, metrics: dict[str, float]) -> None:
        """Steps per second of evaluation, which the stock loop derives from W alone."""
        for key in [key for key in metrics if key.endswith("_steps_per_second") and key != "train_steps_per_second"]:
            runtime = metrics.get(key.removesuffix("_steps_per_second") + "_runtime")
            if runtime is not None:  # else it is a user's own number
                metrics[key] = round(self.num_steps / runtime, 3)


def check_can_evaluate(trainer: Trainer) -> None:
    """Raises RuntimeError where the model is set up for evaluation only when training begins."""
    if trainer.is_deepspeed_enabled and trainer.deepspeed is None:
        stage = trainer.accelerator.state.deepspeed_plugin.zero_stage
        missing = f"DeepSpeed (ZeRO stage {stage}): its engine is made"
    elif trainer.accelerator.is_fsdp2 and not _compat.is_prepared(trainer.model):
        missing = "FSDP 2: accelerate shards model and optimizer together,"
    else:
        return
    raise RuntimeError(
        f"Evaluation before train() is not supported with {missing} when training begins.\n"
        "  Set eval_on_start=True to evaluate before the first step."
    )
