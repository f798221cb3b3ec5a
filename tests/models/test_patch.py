from __future__ import annotations

import copy
import gc
import inspect
import weakref
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import DynamicCache

from hf_cp import (
    ContextParallelConfig,
    DataCollatorForContextParallel,
    apply_context_parallel,
    context_parallel_disabled,
    remove_context_parallel,
)
from hf_cp.distributed.mesh import ContextParallelMesh
from hf_cp.models.patch import ATTENTION_NAME, context_parallel_state
from hf_cp.sequence.layout import SequenceLayout
from hf_cp.sequence.sample import PackedSample, replace
from tests.attention.cases import gather_shards
from tests.attention.reference import relative_error
from tests.models.tiny import FAMILIES, Row, tiny_model

LENGTHS = (13, 1, 22, 6)


def reference_gradients(family: str, dtype: torch.dtype, lengths=LENGTHS, **overrides) -> tuple[float, dict]:
    """Loss and gradients of one process on whole rows, through our loss (HF's rounds the logits to fp32)."""
    model = apply_context_parallel(tiny_model(family, dtype=dtype, **overrides), ContextParallelConfig(force=True))
    # a mesh of this process alone, although a world exists: nothing is exchanged at cp 1
    row = Row(lengths)
    loss = model(**row.local_batch(SequenceLayout(lengths, ContextParallelConfig()), 0)).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def averaged_gradients(model: nn.Module, mesh: ContextParallelMesh) -> dict[str, torch.Tensor]:
    """What DDP would leave in p.grad: the mean over the group."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=mesh.cp_group)
        parameter.grad /= mesh.cp_size
    return {name: p.grad for name, p in model.named_parameters()}


def train_step(
    family: str, ring: int, ulysses: int, dtype: torch.dtype, layout: str = "document", checkpointing=None, **overrides
) -> tuple[float, float]:
    """(error of the loss, worst relative error of a gradient) against one process."""
    config = ContextParallelConfig(ring, ulysses, layout=layout, loss_chunk_tokens=5)
    loss_1, gradients_1 = reference_gradients(family, dtype, **overrides)
    model = apply_context_parallel(tiny_model(family, dtype=dtype, **overrides), config)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
        model.train()
    mesh, row = context_parallel_state(model).mesh, Row(LENGTHS)
    loss = model(**row.local_batch(SequenceLayout(LENGTHS, config), mesh.cp_rank)).loss
    loss.backward()
    gradients = averaged_gradients(model, mesh)
    assert gradients.keys() == gradients_1.keys()
    worst = max(relative_error(gradients[name], expected) for name, expected in gradients_1.items())
    return abs(loss.item() - loss_1), worst


@pytest.mark.distributed
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_every_gradient_are_exact(world4, family):
    for ring, ulysses in ((4, 1), (2, 2), (1, 4), (2, 1)):
        for loss_error, gradient_error in world4.run(train_step, family, ring, ulysses, torch.float64):
            assert loss_error < 1e-12 and gradient_error < 1e-10, (ring, ulysses)


@pytest.mark.distributed
@pytest.mark.parametrize(("loss_limit", "gradient_limit", "dtype"), [(1e-5, 1e-4, torch.float32)])
def test_fp32_error_does_not_grow_with_the_ring(world2, world4, loss_limit, gradient_limit, dtype):
    errors = [world2.run(train_step, "llama", 2, 1, dtype)[0], world4.run(train_step, "llama", 4, 1, dtype)[0]]
    assert all(loss < loss_limit and gradient < gradient_limit for loss, gradient in errors)
    assert errors[1][1] < 2 * errors[0][1] + 1e-6


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
def test_other_layouts_are_exact(world4, layout):
    for loss_error, gradient_error in world4.run(train_step, "llama", 2, 2, torch.float64, layout):
        assert loss_error < 1e-12 and gradient_error < 1e-10


@pytest.mark.distributed
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(world2, use_reentrant):
    for loss_error, gradient_error in world2.run(
        train_step, "qwen3", 2, 1, torch.float64, checkpointing=use_reentrant
    ):
        assert loss_error < 1e-12 and gradient_error < 1e-10


@pytest.mark.distributed
@pytest.mark.parametrize(
    "overrides",
    [
        {"tie_word_embeddings": True},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    ],
    ids=["tied", "yarn", "linear"],
)
def test_model_variants_are_exact(world2, overrides):
    for loss_error, gradient_error in world2.run(train_step, "llama", 2, 1, torch.float64, **overrides):
        assert loss_error < 1e-12 and gradient_error < 1e-10


def untouched_model_step(family: str) -> None:
    """The patched model on shards against the untouched one on whole rows."""
    config, row = ContextParallelConfig(ring_degree=2), Row(LENGTHS)
    untouched = tiny_model(family)
    expected = untouched(**row.whole_batch()).loss
    expected.backward()
    model = apply_context_parallel(tiny_model(family), config)
    mesh = context_parallel_state(model).mesh
    loss = model(**row.local_batch(SequenceLayout(LENGTHS, config), mesh.cp_rank)).loss
    loss.backward()
    assert abs(loss - expected) < 1e-6
    for name, gradient in averaged_gradients(model, mesh).items():
        assert relative_error(gradient, dict(untouched.named_parameters())[name].grad) < 1e-6, name


@pytest.mark.distributed
@pytest.mark.parametrize("family", FAMILIES)
def test_it_equals_the_untouched_model(world2, family):
    world2.run(untouched_model_step, family)


def logits_of_seven_tokens() -> None:
    """A row that does not divide, and logits when no labels are given."""
    config = ContextParallelConfig(ring_degree=2)
    layout, row = SequenceLayout([7], config), Row([7])
    model = apply_context_parallel(tiny_model(), config)
    mesh = context_parallel_state(model).mesh
    batch = row.local_batch(layout, mesh.cp_rank)
    local = model(input_ids=batch["input_ids"], hf_cp_sample=PackedSample(layout)).logits
    whole = layout.unshard(gather_shards(local, mesh), dim=1)
    expected = tiny_model()(row.input_ids[None], use_cache=False).logits
    assert whole.shape == expected.shape and (whole - expected).abs().max() < 1e-10


@pytest.mark.distributed
def test_logits_of_a_row_that_does_not_divide(world2):
    world2.run(logits_of_seven_tokens)


def rotary_positions(layout: str) -> list[int]:
    config = ContextParallelConfig(ring_degree=2, layout=layout)
    model, seen = apply_context_parallel(tiny_model(), config), []
    model.model.rotary_emb.register_forward_hook(
        lambda module, args, kwargs, output: seen.append(kwargs["position_ids"]), with_kwargs=True
    )
    sequence = SequenceLayout([8], config)
    batch = Row([8]).local_batch(sequence, context_parallel_state(model).mesh.cp_rank)
    del batch["position_ids"]  # they are made from the layout, not counted from 0 on every rank
    model(**batch)
    return seen[0].flatten().tolist()


@pytest.mark.distributed
def test_rotary_embeddings_see_global_positions(world2):
    assert world2.run(rotary_positions, "contiguous") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert world2.run(rotary_positions, "document") == world2.run(rotary_positions, "zigzag")
    assert world2.run(rotary_positions, "zigzag") == [[0, 1, 6, 7], [2, 3, 4, 5]]


def two_models() -> None:
    """One config object, two models, one of them patched, with other heads beside a third."""
    shared = tiny_model().config
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    patched, other = LlamaForCausalLM(shared).double(), LlamaForCausalLM(shared).double()
    third = apply_context_parallel(tiny_model(num_attention_heads=8, num_key_value_heads=8), ContextParallelConfig(2))
    row = Row(LENGTHS)
    before = other(**row.whole_batch()).loss
    apply_context_parallel(patched, ContextParallelConfig(2))
    assert other.config._attn_implementation == "sdpa"
    assert other(**row.whole_batch()).loss.equal(before)
    layout = SequenceLayout(LENGTHS, ContextParallelConfig(2))
    for model in (patched, third, patched):
        assert model(**row.local_batch(layout, dist.get_rank())).loss.isfinite()


@pytest.mark.distributed
def test_two_models_do_not_see_each_other(world2):
    world2.run(two_models)


def wrong_batches() -> None:
    """Each of these must raise on both ranks, quickly."""
    config = ContextParallelConfig(ring_degree=2)
    model, row = apply_context_parallel(tiny_model(), config), Row([16])
    layout, rank = SequenceLayout([16], config), dist.get_rank()
    good = row.local_batch(layout, rank)

    def expect(message: str, **changes) -> None:
        batch = {k: v for k, v in (good | changes).items() if v is not None}
        with pytest.raises((ValueError, RuntimeError), match=message):
            model(**batch)

    expect("no hf_cp_sample", hf_cp_sample=None)
    expect("no tuple of loss and logits", return_dict=False)
    expect("no shift_labels", shift_labels=None)
    expect(r"input_ids has shape \(1, 16\)", input_ids=row.input_ids[None])
    expect(r"input_ids has shape \(2, 8\)", input_ids=good["input_ids"].repeat(2, 1))
    expect("not all ones", attention_mask=torch.tensor([[1] * 7 + [0]]))
    causal = torch.full((8, 8), -torch.inf).triu(1)[None, None]
    for mask in (torch.ones(1), torch.ones(1, 16), torch.ones(1, 1, 8, 8), causal, {"full_attention": causal}):
        expect("for each of the 8 slots. Attention is causal", attention_mask=mask)
    other = SequenceLayout([16], ContextParallelConfig(1, 2))
    expect("was made for ring x ulysses = 1 x 2", hf_cp_sample=PackedSample(other))
    other_ids = Row([16], seed=rank).local_batch(layout, rank)  # equal lengths, other tokens
    assert model(**other_ids).loss.isfinite()  # made by hand: only the layouts are compared
    collate = DataCollatorForContextParallel(config, cp_rank=rank)
    collated = [collate([{"input_ids": list(range(16))}]) for _ in range(2)]
    with pytest.raises(
        (ValueError, RuntimeError), match="part of cp_rank 0, but this process is cp_rank 1|cp_rank \\[1\\]"
    ):
        model(**DataCollatorForContextParallel(config, cp_rank=0)([{"input_ids": list(range(16))}]))
    sample = collated[1]["hf_cp_sample"]
    collated[1]["hf_cp_sample"] = replace(sample, digest=sample.digest + rank)
    assert model(**collated[0]).loss.isfinite()
    with pytest.raises(ValueError, match="different samples"):
        model(**collated[1])
    # at fault on one rank only: the other one is told
    if rank == 0:
        expect("input_ids has shape", input_ids=row.input_ids[None])
        expect("different samples", hf_cp_sample=PackedSample(SequenceLayout([8, 8], config)))
        expect("no hf_cp_sample", hf_cp_sample=None)
        expect("no hf_cp_sample", hf_cp_sample=None, labels=None, shift_labels=None)  # text: on this rank alone
    else:
        expect(r"cp_rank \[0\]")
        expect("different samples")
        expect(r"cp_rank \[0\]")
    assert model(**good, attention_mask=torch.ones(1, 8)).loss.isfinite()


@pytest.mark.distributed
def test_wrong_batches_are_refused_on_every_rank(world2):
    world2.run(wrong_batches, timeout=20)


def untouched_model_with_window(family: str, settings: dict, lengths: tuple[int, ...], layout: str) -> None:
    config, row = ContextParallelConfig(ring_degree=2, layout=layout), Row(lengths)
    untouched = tiny_model(family, **settings)
    expected = untouched(**row.whole_batch()).loss
    expected.backward()
    model = apply_context_parallel(tiny_model(family, **settings), config)
    mesh = context_parallel_state(model).mesh
    loss = model(**row.local_batch(SequenceLayout(lengths, config), mesh.cp_rank)).loss
    loss.backward()
    assert abs(loss - expected) < 1e-6
    for name, gradient in averaged_gradients(model, mesh).items():
        assert relative_error(gradient, dict(untouched.named_parameters())[name].grad) < 1e-6, name


QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["document", "contiguous"])
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("mistral", {"sliding_window": 4}),
        ("mistral", {"sliding_window": 16}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 4}),
        ("qwen2", QWEN_WINDOW),
        ("qwen3", QWEN_WINDOW),
    ],
)
def test_sliding_windows_equal_the_untouched_model(world2, family, settings, layout):
    world2.run(untouched_model_with_window, family, settings, (16, 3, 9), layout)


def first_layer_positions_changed_by_token_0() -> list[int]:
    """Positions of the first layer's output that change with token 0, with a window of 4."""
    config, row = ContextParallelConfig(ring_degree=2), Row([16])
    layout = SequenceLayout([16], config)
    model = apply_context_parallel(tiny_model("mistral", sliding_window=4), config)
    mesh, seen = context_parallel_state(model).mesh, []
    model.model.layers[0].self_attn.register_forward_hook(lambda module, args, output: seen.append(output[0].detach()))
    for _ in range(2):
        model(**row.local_batch(layout, mesh.cp_rank))
        row.input_ids[0] += 1
    before, after = (layout.unshard(gather_shards(x, mesh), dim=1) for x in seen)
    return (before != after)[0].any(-1).nonzero().flatten().tolist()


@pytest.mark.distributed
def test_a_window_is_counted_in_global_positions(world2):
    assert world2.run(first_layer_positions_changed_by_token_0) == [[0, 1, 2, 3]] * 2


def test_cp_1_leaves_the_model_alone():
    model = tiny_model()
    attributes = dict(vars(model))
    assert apply_context_parallel(model, ContextParallelConfig()) is model
    assert vars(model).keys() == attributes.keys() and model.config._attn_implementation == "sdpa"
    assert context_parallel_state(model) is None
    assert remove_context_parallel(model) is model


def test_remove_restores_the_model():
    model, row = tiny_model(), Row(LENGTHS)
    before = model(**row.whole_batch()).loss
    keys = set(vars(model))
    apply_context_parallel(model, ContextParallelConfig(force=True))
    with pytest.raises(ValueError, match="no hf_cp_sample"):
        model(**row.whole_batch())
    with pytest.raises(ValueError, match="already context-parallel"):
        apply_context_parallel(model, ContextParallelConfig(force=True))
    remove_context_parallel(model)
    assert set(vars(model)) == keys and "forward" not in vars(model)
    assert model(**row.whole_batch()).loss.equal(before)


def test_disabled_inside_a_block_even_if_it_raises():
    model, row = apply_context_parallel(tiny_model(), ContextParallelConfig(force=True)), Row(LENGTHS)
    expected = tiny_model()(**row.whole_batch())
    with context_parallel_disabled(model):
        assert model(**row.whole_batch()).logits.equal(expected.logits)
    with pytest.raises(RuntimeError, match="stop"), context_parallel_disabled(model):
        raise RuntimeError("stop")
    batch = row.local_batch(SequenceLayout(LENGTHS, ContextParallelConfig()), 0)
    assert abs(model(**batch).loss - expected.loss) < 1e-6
    with patch.object(type(model), "set_attn_implementation", autospec=True) as set_attention:
        set_attention.side_effect = [ImportError("not installed"), None]
        with pytest.raises(ImportError), context_parallel_disabled(model):
            pass
        assert set_attention.call_args.args[1] == ATTENTION_NAME
    assert context_parallel_state(model).active


def test_tuples_are_refused_with_labels_and_made_without():
    model, row = apply_context_parallel(tiny_model(), ContextParallelConfig(force=True)), Row(LENGTHS)
    batch = row.local_batch(SequenceLayout(LENGTHS, ContextParallelConfig()), 0)
    inputs = {name: batch[name] for name in ("input_ids", "hf_cp_sample")}
    model.config.return_dict = False
    with pytest.raises(ValueError, match="no tuple of loss and logits"):
        model(**batch)
    assert model(**batch, return_dict=True).loss.isfinite()
    model.config.return_dict = True
    (logits,) = model(**inputs, return_dict=False)
    assert logits.equal(model(**inputs).logits)


def test_generate_runs_the_original_attention():
    prompt = torch.tensor([[5, 6, 7, 8]])
    settings = {"max_new_tokens": 6, "do_sample": False}
    expected = tiny_model().generate(prompt, **settings)
    model = apply_context_parallel(tiny_model(), ContextParallelConfig(force=True))
    assert model.generate(prompt, **settings).equal(expected)
    assert model.config._attn_implementation == "hf_cp_usp"


def test_a_saved_model_does_not_mention_the_patch(tmp_path):
    model = apply_context_parallel(tiny_model(), ContextParallelConfig(force=True))
    model.save_pretrained(tmp_path)
    assert "hf_cp" not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
    ],
)
def test_settings_that_cannot_be_exact_are_refused(family, settings, message):
    with pytest.raises(ValueError, match=message):
        apply_context_parallel(tiny_model(family, **settings), ContextParallelConfig(force=True))


def test_unknown_models_are_refused():
    from transformers import GPT2Config, GPT2LMHeadModel

    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match="model_type 'gpt2'.*llama, mistral, qwen2, qwen3"):
        apply_context_parallel(gpt2, ContextParallelConfig(force=True))
    with pytest.raises(ValueError, match="headless|not supported"):
        apply_context_parallel(tiny_model().model, ContextParallelConfig(force=True))
    with pytest.raises(ValueError, match="holds no Hugging Face PreTrainedModel"):
        apply_context_parallel(nn.Linear(2, 2), ContextParallelConfig(force=True))


def test_the_kernel_is_said_once(caplog):
    config, row = ContextParallelConfig(force=True), Row(LENGTHS)
    with caplog.at_level("INFO"):
        model = apply_context_parallel(tiny_model(), config)
        for _ in range(2):
            model(**row.local_batch(SequenceLayout(LENGTHS, config), 0))
    said = [record.getMessage() for record in caplog.records if record.name.startswith("hf_cp.models.")]
    assert "layout document, ring_comm auto, kernel auto" in said[0]
    assert said[1:] == ["Attention runs the sdpa kernel in torch.float64 on cpu"]


def test_heads_are_checked_before_the_world():
    with pytest.raises(ValueError, match="does not divide the 4 query heads"):
        apply_context_parallel(tiny_model(), ContextParallelConfig(ulysses_degree=3))


def test_a_removed_model_can_be_collected():
    model = apply_context_parallel(tiny_model(), ContextParallelConfig(force=True))
    remove_context_parallel(model)
    weak = weakref.ref(model)
    del model
    gc.collect()
    assert weak() is None


def test_a_row_is_freed_with_its_plans():
    """No cycle keeps schedules (index tensors on the device) until a garbage collection."""
    layout = SequenceLayout([8], ContextParallelConfig(force=True))
    model = apply_context_parallel(tiny_model(), ContextParallelConfig(force=True))
    model(**Row([8]).local_batch(layout, 0)).loss.backward()
    weak = weakref.ref(layout)
    gc.disable()
    del layout
    gone = weak() is None
    gc.enable()
    assert gone


@pytest.mark.parametrize("mlp_chunk_tokens", [None, 4])
def test_a_copied_model_runs_on_its_own_weights(mlp_chunk_tokens):
    """In every way: split loss, whole rows, and after the removal; the original's weights are zero by then."""
    config, row = ContextParallelConfig(force=True, mlp_chunk_tokens=mlp_chunk_tokens), Row(LENGTHS)
    model = apply_context_parallel(tiny_model(), config)
    batch, ids = row.local_batch(SequenceLayout(LENGTHS, config), 0), torch.arange(9).unsqueeze(0)
    with context_parallel_disabled(model):
        expected, logits = model(**batch).loss, model(ids).logits
    loss = model(**batch).loss
    model, original = copy.deepcopy(model), model
    remove_context_parallel(original)
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.zero_()
    assert model(**batch).loss.equal(loss)
    with context_parallel_disabled(model):
        assert model(**batch).loss.equal(expected) and model(ids).logits.equal(logits)
    assert model(ids, use_cache=True, cache=DynamicCache()).logits.equal(logits)  # as in generate()
    remove_context_parallel(model)
    assert model(ids).logits.equal(logits)


def test_the_signature_stays():
    model = tiny_model()
    parameters = list(inspect.signature(model.forward).parameters)
    apply_context_parallel(model, ContextParallelConfig(force=True))
    assert list(inspect.signature(model.forward).parameters) == parameters
