"""The packed loader under the stock Trainer: epochs, steps, and resuming inside an epoch."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hf_cp.config import ContextParallelConfig
from hf_cp.data.collator import DataCollatorForContextParallel
from hf_cp.data.loader import ContextParallelDataLoader
from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.mesh import ContextParallelMesh

FEATURES = [[i] * 6 for i in range(1, 9)]  # 8 samples of one document


class RowsTrainer(Trainer):
    """A stock Trainer on packed samples; notes the document of every sample that it trains on."""

    def get_train_dataloader(self) -> ContextParallelDataLoader:
        self.trained: list[int] = []
        mesh = ContextParallelMesh(self.data_collator.config)
        return ContextParallelDataLoader(
            FEATURES, collator=self.data_collator, comm=Communicator(mesh), shuffle=True, seed=3, num_workers=2
        )

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.trained.append(int(inputs["input_ids"][0, 0]))
        return super().training_step(model, inputs, num_items_in_batch)


def train(folder, *, resume: str | None = None, save_steps: int = 1000) -> list[int]:
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    args = TrainingArguments(
        str(folder),
        num_train_epochs=2,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        save_steps=save_steps,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    collator = DataCollatorForContextParallel(ContextParallelConfig(), max_tokens=8)
    trainer = RowsTrainer(LlamaForCausalLM(config), args, data_collator=collator, train_dataset=FEATURES)
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.state.global_step == 8
    return trainer.trained


@pytest.mark.parametrize("step", [3, 4, 6])  # inside the first epoch, between epochs, inside the second
def test_resumed_training_sees_the_remaining_samples(tmp_path, step: int) -> None:
    """Each sample once an epoch, in the order of the run that was not interrupted."""
    whole = train(tmp_path / "whole", save_steps=step)
    assert sorted(whole[:8]) == sorted(whole[8:]) == list(range(1, 9))
    assert whole[:8] != whole[8:]
    resumed = train(tmp_path / "resumed", resume=str(tmp_path / "whole" / f"checkpoint-{step}"))
    assert resumed == whole[2 * step :]
