"""Private names of other libraries: each function of hf_cp/_compat.py does what it says on the installed versions."""

from __future__ import annotations

import inspect
import sys
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


def limit_of_the_world() -> float:
    return _compat.group_time_limit(torch.distributed.group.WORLD, "cpu").total_seconds()


def test_time_limit_of_a_group(world2):
    """The test worlds are made with 60 seconds."""
    assert world2.run(limit_of_the_world) == [60.0, 60.0]


def test_profiling_is_noticed():
    assert not _compat.is_profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert _compat.is_profiling()


def test_parameters_of_a_module_can_be_stood_in_for():
    linear = torch.nn.Linear(2, 2, bias=False)
    parameters, own = _compat.parameters_of(linear), linear.weight
    parameters["weight"] = own * 2  # no leaf: setattr would refuse it
    assert linear(torch.ones(1, 2)).equal(2 * (torch.ones(1, 2) @ own.T))
    parameters["weight"] = own


def test_flash_attention_of_the_cpu_gives_its_log_sum_exp():
    q = torch.randn(1, 1, 3, 8, dtype=torch.float64)
    out, lse = _compat.aten_cpu_flash().forward(q, q, q, 0.0, False, scale=1.0)
    assert torch.allclose(lse, (q @ q.transpose(-1, -2)).logsumexp(-1))
    grads = _compat.aten_cpu_flash().backward(torch.ones_like(out), q, q, q, out, lse, 0.0, False, scale=1.0)
    assert [grad.shape for grad in grads] == [q.shape] * 3


def test_flash_attention_of_cuda_has_the_arguments_that_are_given():
    names = [[a.name for a in op.default._schema.arguments] for op in _compat.aten_flash()]
    assert names[0][:7] == ["query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k"]
    assert names[1][:6] == ["grad_out", "query", "key", "value", "out", "logsumexp"]
    assert all({"window_size_left", "window_size_right", "scale"} <= set(given) for given in names)


def test_flash_attn_is_taken_from_its_module(monkeypatch):
    functions = {f"_flash_attn_varlen_{way}": object() for way in ("forward", "backward")}
    interface = SimpleNamespace(**functions)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_interface=interface))
    assert _compat.flash_attn_varlen() == tuple(functions.values())


def test_checkpointing_of_a_layer():
    model = make_model()
    layer, seen = model.model.layers[0], []
    with _compat.checkpointed_through(layer, lambda run: run):
        pass  # nothing was switched on
    model.gradient_checkpointing_enable({"use_reentrant": False})
    before = _compat.checkpoint_function(layer)
    assert getattr(before, "func", before) is torch.utils.checkpoint.checkpoint

    def wrap(run):
        return lambda *args, **kwargs: (seen.append("run"), run(*args, **kwargs))[1]

    with _compat.checkpointed_through(layer, wrap):
        loss = model.train()(input_ids=torch.ones(1, 4, dtype=torch.int64)).logits.sum()
    loss.backward()
    assert seen == ["run", "run"] and _compat.checkpoint_function(layer) is before  # forward, and again in backward


def test_attention_of_a_model():
    assert _compat.attention_implementation(make_model().config) == "sdpa"


def test_every_function_is_called_here():
    functions = [name for name, _ in inspect.getmembers(_compat, inspect.isfunction) if name[0] != "_"]
    own = [name for name in functions if getattr(_compat, name).__module__ == _compat.__name__]
    source = inspect.getsource(sys.modules[__name__])
    assert [name for name in own if f"_compat.{name}(" not in source] == []
