"""Context parallelism in a custom training loop with Accelerate, with or without DeepSpeed ZeRO.

Invariant: for any split of the documents over ranks, samples and micro-steps, one optimizer step follows the gradient
of the mean token loss over all targets of the step. DDP, FSDP2 and ZeRO average gradients over all W processes and
`Accelerator.backward` divides by the accumulation steps GA, so a rank's loss is (sum of its token losses) times
W x GA / N:

    1/W x sum over ranks and micro-steps of 1/GA x grad(local_sum x W x GA / N)  =  grad(sum of all token losses) / N
    (1/W: mean by the backend; 1/GA: backward)

A loop (examples/accelerate_loop.py runs one):

    plugin = ContextParallelPlugin(ContextParallelConfig(ring_degree=2))
    zero = plugin.deepspeed_plugin(zero_stage=2)
    accelerator = plugin.accelerator(gradient_accumulation_steps=4, deepspeed_plugin=zero)
    model, optimizer = accelerator.prepare(apply_context_parallel(model, plugin.config, mesh=plugin.mesh), optimizer)
    loader = plugin.data_loader(documents, max_tokens=131_072)
    plugin.seed_dropout(0)
    for batches, num_items in plugin.accumulation_windows(loader):
        for batch in batches:
            accelerator.backward(plugin.loss(model, batch, num_items=num_items))
        optimizer.step()
        optimizer.zero_grad()
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs
from torch.nn.parallel import DistributedDataParallel

from hf_cp.config import IGNORE_INDEX, ContextParallelConfig
from hf_cp.data.collator import DataCollatorForContextParallel
from hf_cp.data.loader import ContextParallelDataLoader
from hf_cp.data.streaming import BUFFER_DOCUMENTS, StreamDataLoader, is_stream
from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.host import sum_over_world
from hf_cp.distributed.mesh import ContextParallelMesh
from hf_cp.training.backend import check_and_complete
from hf_cp.training.checkpoint import CheckpointRecord, check_states, log_differences
from hf_cp.training.checks import GradientSums, Launch, OtherParallelism, PreparedLoader, is_asked_for, refuse
from hf_cp.training.deepspeed import make_zero_config


class ContextParallelPlugin:
    """Builds the Accelerator for context parallelism and keeps a custom loop exact.

    Args:
        config (`ContextParallelConfig`): how one sample is split over processes.

    Attributes:
        config (`ContextParallelConfig`): as given.
        mesh (`ContextParallelMesh`): the process groups; exists once [`ContextParallelPlugin.accelerator`] was called.
    """

    def __init__(self, config: ContextParallelConfig):
        self.config = config
        self._accelerator: Accelerator | None = None
        self._comm: Communicator | None = None
        self._checked_model: torch.nn.Module | None = None

    def deepspeed_plugin(
        self, zero_stage: int = 2, *, gradient_clipping: float = 0.0, config: dict[str, Any] | str | Path | None = None
    ) -> DeepSpeedPlugin:
        """A DeepSpeed plugin for [`ContextParallelPlugin.accelerator`], in which DeepSpeed knows nothing of sequences.

        Args:
            zero_stage (`int`, *optional*, defaults to 2): what ZeRO shards over all W processes.
            gradient_clipping (`float`, *optional*, defaults to 0.0): largest gradient norm; 0 turns clipping off.
                (`Accelerator.clip_grad_norm_` cannot clip under DeepSpeed, its engine does.)
            config (`dict` or path, *optional*): more DeepSpeed settings. Precision is the Accelerator's
                `mixed_precision`.

        Raises:
            ValueError: the stage is unknown, or `config` contradicts the arguments or context parallelism.
        """
        return DeepSpeedPlugin(
            hf_ds_config=make_zero_config(zero_stage, gradient_clipping=gradient_clipping, config=config)
        )

    def accelerator(self, **kwargs: Any) -> Accelerator:
        """Builds the Accelerator and the mesh, and checks that what was asked for really runs.

        Args:
            kwargs: those of [`accelerate.Accelerator`]. `step_scheduler_with_optimizer` defaults to False here:
                accelerate would step a prepared scheduler once per process and optimizer step, but a step has dp
                samples, not W.

        Raises:
            ValueError: the number of processes does not fit, accelerate's own cp/sp/tp sizes are not 1, batches are
                to be split or dispatched, or the DeepSpeed config contradicts the run.
            RuntimeError: fewer processes run than were launched, or DeepSpeed or FSDP is silently off.
        """
        refuse(OtherParallelism.of(kwargs.get("parallelism_config")))
        # DeepSpeed and FSDP may be asked for by argument or, through `accelerate launch`, by environment
        wants_deepspeed = (
            kwargs.get("deepspeed_plugin") is not None
            or kwargs.get("deepspeed_plugins") is not None
            or is_asked_for("DEEPSPEED")
        )
        if not torch.accelerator.is_available():
            # Without a GPU accelerate joins the launched processes only with cpu=True, which switches DeepSpeed off.
            # So the processes are joined first, with the user's time limit; the Accelerator then finds them.
            handlers = [h for h in kwargs.get("kwargs_handlers") or () if isinstance(h, InitProcessGroupKwargs)]
            PartialState(cpu=True, **(handlers[0].to_kwargs() if handlers else {}))
        accelerator = _Accelerator(**{"step_scheduler_with_optimizer": False, **kwargs})
        launch = Launch.of(
            accelerator,
            cp_size=self.config.cp_size,
            wants_deepspeed=wants_deepspeed,
            wants_fsdp=kwargs.get("fsdp_plugin") is not None or is_asked_for("FSDP"),
            wants_mixed_precision=kwargs.get("mixed_precision"),
        )
        check_and_complete(accelerator, launch)
        self._accelerator = accelerator
        self._comm = Communicator(ContextParallelMesh(self.config, device_type=accelerator.device.type))
        accelerator.register_save_state_pre_hook(self._save_record)
        accelerator.before_load = self._check_record
        return accelerator

    def data_loader(
        self,
        documents: Sequence[Any],
        *,
        max_tokens: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        num_workers: int = 0,
        group_by_cost: bool = False,
        **collator_kwargs: Any,
    ) -> ContextParallelDataLoader:
        """Packs documents into samples and deals them to this rank.

        The loader is registered with the accelerator: `save_state` and `load_state` keep its position, if the loaders
        are made in the same order when resuming.

        Args:
            documents (sequence): features as [`DataCollatorForContextParallel`] reads them, the same on every rank.
            max_tokens (`int`): the longest sample.
            shuffle, seed, drop_last, num_workers, group_by_cost: see [`ContextParallelDataLoader`].
            collator_kwargs: `overflow`, `tokenizer`, ... of [`DataCollatorForContextParallel`].
        """
        collator = DataCollatorForContextParallel(self.config, max_tokens=max_tokens, **collator_kwargs)
        if is_stream(documents):
            raise ValueError(
                f"{type(documents).__name__} is a stream. Use plugin.stream_loader(...), which goes on for ever."
            )
        loader = ContextParallelDataLoader(
            documents,
            collator=collator,
            comm=self._comm,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            num_workers=num_workers,
            samples_per_step=self.samples_per_step,
            group_by_cost=group_by_cost,
        )
        return self._ready().prepare_data_loader(loader)  # registers it and returns it as it is

    def stream_loader(
        self,
        stream: Iterable[Any],
        *,
        max_tokens: int,
        shuffle: bool = False,
        seed: int = 0,
        buffer_documents: int = BUFFER_DOCUMENTS,
        **collator_kwargs: Any,
    ) -> StreamDataLoader:
        """Packs a stream into samples as it comes and deals them to this rank, for ever: the loop must end itself.

        Registered with the accelerator like [`ContextParallelPlugin.data_loader`]; the arguments are those of
        [`StreamDataLoader`].
        """
        loader = StreamDataLoader(
            stream,
            collator=DataCollatorForContextParallel(self.config, max_tokens=max_tokens, **collator_kwargs),
            comm=self._comm,
            shuffle=shuffle,
            seed=seed,
            samples_per_step=self.samples_per_step,
            buffer_documents=buffer_documents,
        )
        return self._ready().prepare_data_loader(loader)

    def seed_dropout(self, seed: int) -> None:
        """Gives the ranks of a sample different dropout masks; call it once before the loop, after the model is made.

        After one seed everywhere, as is needed for equal weights, they would drop the same units of different tokens.

        Args:
            seed (`int`): the same on all ranks; this rank's random state is seeded with `seed + cp_rank`.
        """
        torch.manual_seed(seed + self.mesh.cp_rank)

    @property
    def mesh(self) -> ContextParallelMesh:
        if self._comm is None:
            raise RuntimeError("The process groups do not exist yet. Call plugin.accelerator(...) first.")
        return self._comm.mesh

    @property
    def rows_per_step(self) -> int:
        """The earlier name of `samples_per_step`."""
        return self.samples_per_step

    @property
    def samples_per_step(self) -> int:
        """Samples that one optimizer step sees: 1 sample x accumulation steps x dp; ranks of one sample count once."""
        return self._ready().gradient_accumulation_steps * self.mesh.dp_size

    def accumulation_windows(self, loader: Iterable[dict]) -> Iterator[tuple[Iterator[dict], int]]:
        """The micro-batches of each optimizer step, with the number of targets that they hold over all ranks.

        A last step that is short counts too: walking `batches` sets `accelerator.sync_gradients`, true only for the
        last micro-batch of the step.

        Args:
            loader: batches from [`ContextParallelPlugin.data_loader`], equally many on every rank.

        Yields:
            `(batches, num_items)`: an iterator of batches on the accelerator's device, and the targets of the step
            (the same number on every rank; 0 if all labels are masked).
        """
        accelerator = self._ready()
        batches = iter(loader)
        while step := list(itertools.islice(batches, accelerator.gradient_accumulation_steps)):
            local_items = sum(int((batch["shift_labels"] != IGNORE_INDEX).sum()) for batch in step)
            (num_items,) = sum_over_world([local_items], comm=self._comm)
            yield self._walk(step), num_items

    def loss(self, model: torch.nn.Module, batch: dict, *, num_items: int) -> torch.Tensor:
        """This rank's part of the step's mean token loss, scaled for `Accelerator.backward`.

        Args:
            model (`torch.nn.Module`): as prepared by the accelerator.
            batch (`dict`): one of the step's batches.
            num_items (`int`): the step's targets over all ranks, from
                [`ContextParallelPlugin.accumulation_windows`].

        Returns:
            `torch.Tensor` [], with a graph also where every label is masked. Averaged over all ranks and micro-steps
            of the step (and divided by nothing else) it is the mean token loss; plus, as in the Trainer, the
            load-balancing losses of its samples, for a mixture of experts that is trained with them.

        Raises:
            ValueError: gradients would be added up in 16 bits over the ranks of a sample.
        """
        accelerator = self._ready()
        if self._checked_model is not model:
            refuse(GradientSums.of_accelerator(accelerator, model, cp_size=self.mesh.cp_size))
            self._checked_model = model
        # DDP decides in the forward whether this backward will communicate; only the last one of a step has to.
        is_quiet = isinstance(model, DistributedDataParallel) and not accelerator.sync_gradients
        with model.no_sync() if is_quiet else contextlib.nullcontext():
            share = model(**batch, num_items_in_batch=max(1, num_items)).loss  # local_sum / N
        # x W: the backend averages over all W processes. x GA: accelerate (DDP) and DeepSpeed's engine both divide
        # every loss by the configured GA, in a short last step too.
        return share * (accelerator.num_processes * accelerator.gradient_accumulation_steps)

    def _walk(self, step: list[dict]) -> Iterator[dict]:
        accelerator = self._ready()
        for number, batch in enumerate(step, start=1):
            accelerator.sync_gradients = number == len(step)
            yield {
                key: value.to(accelerator.device, non_blocking=True) if isinstance(value, torch.Tensor) else value
                for key, value in batch.items()
            }

    # Checkpoints: what `save_state` adds to them, and what `load_state` checks

    def _record(self) -> CheckpointRecord:
        return CheckpointRecord.of(self._ready(), self.mesh, self.config, samples_per_step=self.samples_per_step)

    def _save_record(self, models: list, weights: list, output_dir: str) -> None:
        if not self._ready().sync_gradients:
            raise RuntimeError(
                "save_state was called between the micro-batches of an optimizer step: its gradients so far are in no "
                "checkpoint, and the loader is at the step's end already.\n  Save after optimizer.step()."
            )
        if self._ready().is_main_process:
            self._record().save(output_dir)

    def _check_record(self, input_dir: str) -> None:
        saved, current = CheckpointRecord.load(input_dir), self._record()
        if saved is None:
            return  # written without this plugin; a packed loader's position is checked by the loader
        check_states(saved, current, change=f"Resume with {saved.world_size} processes; cp_size may be another one.")
        log_differences(saved, current, folder=input_dir)

    def _ready(self) -> Accelerator:
        if self._accelerator is None:
            raise RuntimeError("There is no Accelerator yet. Call plugin.accelerator(...) first.")
        return self._accelerator


class _Accelerator(Accelerator):
    """Shows a checkpoint to `before_load` first; accelerate's own hooks come after DeepSpeed and FSDP have loaded.

    Refuses loaders whose batches it would deal to the wrong ranks.
    """

    before_load: Callable[[str], None]

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            folders = Path(self.project_dir, "checkpoints").glob("checkpoint_*")
            input_dir = str(max(folders, key=lambda folder: int(folder.name.split("_")[1])))
        if input_dir is not None:
            self.before_load(input_dir)
        super().load_state(input_dir, *args, **kwargs)

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        refuse(PreparedLoader(data_loader))
        return super().prepare_data_loader(data_loader, *args, **kwargs)
