"""Private names of other libraries: each function of hf_cp/_compat.py does what it says on the installed versions."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from torch.utils.data import DataLoader
from transformers import Trainer

from hf_cp import _compat
from tests.training.tiny import make_arguments, make_model


def test_trees():
    tree = {"a": (torch.ones(1), [torch.zeros(2)])}
    leaves, structure = _compat.flatten_tree(tree)
    assert [len(leaf) for leaf in leaves] == [1, 2] and structure.num_leaves == 2
    assert _compat.unflatten_tree([1, 2], structure) == {"a": (1, [2])}


def test_storage_key():
    x = torch.zeros(4)
    assert _compat.storage_key(x) == _compat.storage_key(x[1:]) != _compat.storage_key(torch.zeros(4))


def test_results_of_operators():
    seen = []
    with _compat.results_of_operators(lambda x: seen.append(tuple(x.shape))):
        torch.zeros(2, 3).sum(0)
    torch.zeros(5)
    assert seen == [(2, 3), (3,)]


def test_accelerate_forgets_what_was_launched():
    PartialState(cpu=True)
    assert PartialState().initialized
    _compat.forget_accelerate_state()
    assert not PartialState._shared_state and not AcceleratorState._shared_state


def test_batches_of_a_trainer():
    """And the private names that our Trainer overrides or passes on."""
    trainer = Trainer(make_model(), make_arguments())
    moved = _compat.on_device(trainer, {"input_ids": torch.ones(1, 2), "name": "a"})
    assert moved["input_ids"].device == trainer.args.device and moved["name"] == "a"
    assert "inputs" in inspect.signature(Trainer._track_num_input_tokens).parameters
    assert "_internal_call" in inspect.signature(Trainer.save_model).parameters


def test_prepared_models():
    """accelerate sets a model up once, and once more if it has been made to forget."""
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(1, 1)
    assert not _compat.is_prepared(model)
    accelerator.prepare_model(model, evaluation_mode=True)
    assert _compat.is_prepared(model)
    _compat.forget_prepared(model)
    assert not _compat.is_prepared(model)


def test_gradient_norm_of_deepspeed():
    """Where the engine looks for it."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    assert '"_global_grad_norm"' in inspect.getsource(DeepSpeedEngine._take_model_step).replace("'", '"')
    optimizer = torch.optim.SGD([torch.zeros(1)])
    assert not _compat.knows_grad_norm(optimizer)
    _compat.note_grad_norm(optimizer, 2.0)
    assert _compat.knows_grad_norm(optimizer) and optimizer._global_grad_norm == 2.0


def test_tokens_of_sft():
    """The names that SFTTrainer counts under."""
    from trl import SFTTrainer

    source = inspect.getsource(SFTTrainer.compute_loss)
    assert "self._total_train_tokens +=" in source and 'self._metrics[mode]["num_tokens"]' in source
    trainer = SimpleNamespace(_total_train_tokens=3, _metrics={"train": {"num_tokens": [3]}})
    _compat.note_trained_tokens(trainer, 5)
    assert _compat.trained_tokens(trainer) == 5 and trainer._metrics["train"]["num_tokens"] == [5]


def test_prepared_loaders():
    """accelerate puts a loader of its own around one that is not marked."""
    accelerator, loader = Accelerator(cpu=True, split_batches=True), DataLoader([1, 2])
    assert accelerator.prepare(loader) is not loader
    _compat.mark_prepared(loader)
    assert accelerator.prepare(loader) is loader
    accelerator.free_memory()
