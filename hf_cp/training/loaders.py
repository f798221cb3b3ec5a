"""Loaders of packed samples, from the Trainer's arguments; and what their batches count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from hf_cp.data.collator import DataCollatorForContextParallel
from hf_cp.data.loader import ContextParallelDataLoader
from hf_cp.data.streaming import StreamDataLoader, is_stream
from hf_cp.distributed.communicator import Communicator
from hf_cp.sequence.sample import SAMPLE_KEY
from hf_cp.training.checks import Documents, refuse


class SampleLoaders:
    """Makes the loaders of a Trainer: the ranks of a context-parallel group share a sample, dp ranks have others.

    Args:
        trainer (`Trainer`): a [`ContextParallelTrainerMixin`]; its arguments, collator and data sets are read when a
            loader is made.
    """

    def __init__(self, trainer: Trainer):
        self._trainer = trainer
        self._evaluated: list[tuple[Any, ContextParallelDataLoader]] = []  # data set, its loader

    @property
    def _args(self) -> TrainingArguments:
        return self._trainer.args

    @property
    def _collator(self) -> DataCollatorForContextParallel:
        return self._trainer.data_collator

    @property
    def _seed(self) -> int:
        return self._args.seed if self._args.data_seed is None else self._args.data_seed

    @property
    def _comm(self) -> Communicator:
        return self._trainer.cp_comm

    def for_training(self) -> ContextParallelDataLoader | StreamDataLoader:
        """Of the Trainer's `train_dataset`, packed once or as it streams.

        Raises:
            ValueError: there is none, it cannot be read, or a stream is asked for what needs all documents.
        """
        args, dataset = self._args, self._trainer.train_dataset
        if dataset is None:
            raise ValueError("There is no train_dataset. Pass train_dataset=... to train.")
        refuse(Documents(dataset, args))
        settings = {
            "collator": self._collator,
            "comm": self._comm,
            "shuffle": args.train_sampling_strategy != "sequential",
            "seed": self._seed,
            "samples_per_step": args.gradient_accumulation_steps * self._trainer.cp_mesh.dp_size,
        }
        if is_stream(dataset):
            return StreamDataLoader(dataset, buffer_documents=self._trainer.stream_buffer_documents, **settings)
        return ContextParallelDataLoader(
            dataset,
            batch_size=args.train_batch_size if self._collator.max_tokens is None else 1,
            drop_last=args.dataloader_drop_last,
            group_by_cost=args.train_sampling_strategy == "group_by_length",
            num_workers=args.dataloader_num_workers,
            **settings,
        )

    def for_evaluation(self, eval_dataset: str | Dataset | None) -> ContextParallelDataLoader:
        """Of this data set, or of the Trainer's; the Trainer's own are packed once.

        They are told apart as objects: one that has been replaced is packed anew (and the reference that is kept here
        rules out that another object has taken its place).
        """
        known = self._trainer.eval_dataset
        if eval_dataset is None and known is None:
            raise ValueError("There is no eval_dataset. Pass eval_dataset=... to evaluate.")
        if isinstance(eval_dataset, str):
            eval_dataset = known[eval_dataset]
        elif eval_dataset is None:
            eval_dataset = known
        own = known.values() if isinstance(known, dict) else [known]
        self._evaluated = [pair for pair in self._evaluated if any(pair[0] is dataset for dataset in own)]
        for dataset, loader in self._evaluated:
            if dataset is eval_dataset:
                return loader
        loader = self.in_order(eval_dataset)
        if any(eval_dataset is dataset for dataset in own):
            self._evaluated.append((eval_dataset, loader))
        return loader

    def in_order(self, dataset: Dataset) -> ContextParallelDataLoader:
        """Every document once, in natural order; where dp ranks run out of samples, they get dummy samples."""
        refuse(*Documents.each(dataset))
        return ContextParallelDataLoader(
            dataset,
            collator=self._collator,
            comm=self._comm,
            batch_size=self._args.eval_batch_size if self._collator.max_tokens is None else 1,
            seed=self._seed,
            num_workers=self._args.dataloader_num_workers,
        )

    def count_tokens(self, batch: Mapping[str, Any]) -> int:
        """Tokens of documents in this rank's batch, counted by the first rank of a shared sample; a dummy has none."""
        if self._collator.is_dummy(batch):
            return 0
        sample = batch.get(SAMPLE_KEY)
        if sample is None:  # a whole sample on every process
            return batch["input_ids"].numel()
        return 0 if self._trainer.cp_mesh.cp_rank else sample.layout.num_tokens


def num_examples(loader: ContextParallelDataLoader) -> int:
    """Samples of an epoch over all dp ranks (features, if documents are not packed), without dummy samples."""
    manifest = loader.manifest
    return len(set(manifest.sources)) if manifest.max_tokens is None else len(manifest.samples)
