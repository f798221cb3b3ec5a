"""The loader of training rows, from the Trainer's arguments: for a data set that is packed once, or for a stream."""

from __future__ import annotations

from typing import Any

from transformers import TrainingArguments

from hf_cp.data.collator import DataCollatorForContextParallel
from hf_cp.data.loader import ContextParallelDataLoader
from hf_cp.data.streaming import StreamDataLoader, is_stream
from hf_cp.distributed.communicator import Communicator
from hf_cp.training.checks import Documents, refuse


def make_train_loader(
    dataset: Any,
    *,
    args: TrainingArguments,
    collator: DataCollatorForContextParallel,
    comm: Communicator,
    buffer_documents: int,
) -> ContextParallelDataLoader | StreamDataLoader:
    """Rows for this rank.

    Raises:
        ValueError: the data set cannot be read, or a stream is asked for what needs all documents.
    """
    refuse(Documents(dataset, args))
    settings = {
        "collator": collator,
        "comm": comm,
        "shuffle": args.train_sampling_strategy != "sequential",
        "seed": args.seed if args.data_seed is None else args.data_seed,
        "rows_per_step": args.gradient_accumulation_steps * comm.mesh.dp_size,
    }
    if is_stream(dataset):
        return StreamDataLoader(dataset, buffer_documents=buffer_documents, **settings)
    return ContextParallelDataLoader(
        dataset,
        batch_size=args.train_batch_size if collator.max_tokens is None else 1,
        drop_last=args.dataloader_drop_last,
        group_by_cost=args.train_sampling_strategy == "group_by_length",
        num_workers=args.dataloader_num_workers,
        **settings,
    )
