"""Losses of held-out documents: each counted once for every split, and the standard error of their drop."""

from __future__ import annotations

import math

import pytest
import torch

from hf_cp.config import ContextParallelConfig
from hf_cp.data.collator import DataCollatorForContextParallel
from hf_cp.data.loader import ContextParallelDataLoader
from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.mesh import ContextParallelMesh
from hf_cp.models.patch import apply_context_parallel
from hf_cp.recipes.held_out import DocumentLosses, LossDrop, document_losses
from hf_cp.recipes.outputs import peak_memory_gib, plot_losses
from tests.models.tiny import VOCAB_SIZE, tiny_model

LENGTHS = (17, 1, 30, 9, 5, 24)  # packed into 3 samples of 32: odd for dp 2


def documents() -> list[dict]:
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in LENGTHS]
    prompts = [n // 3 for n in LENGTHS]  # masked, so that documents have other numbers of targets than tokens
    return [{"input_ids": i, "labels": [-100] * p + i[p:]} for i, p in zip(ids, prompts, strict=True)]


def evaluate(config: ContextParallelConfig, skip: int = 0, **settings: bool) -> DocumentLosses:
    comm = Communicator(ContextParallelMesh(config))
    model = apply_context_parallel(tiny_model(), config, mesh=comm.mesh).train()
    collator = DataCollatorForContextParallel(config, max_tokens=32)
    loader = ContextParallelDataLoader(documents(), collator=collator, comm=comm, **settings).skip(skip)
    losses = document_losses(model, loader, comm=comm)
    assert model.training
    return losses


def reference() -> DocumentLosses:
    """Every document alone in the untouched model, loss written out."""
    model, sums, targets = tiny_model(), [], []
    for document in documents():
        logits = model(torch.tensor([document["input_ids"]])).logits[0, :-1]
        labels = torch.tensor(document["labels"][1:], dtype=torch.int64)
        kept = labels != -100
        sums.append(-logits.log_softmax(-1)[kept, labels[kept]].sum().item())
        targets.append(int(kept.sum()))
    return DocumentLosses(tuple(sums), tuple(targets))


def check(found: DocumentLosses) -> None:
    expected = reference()
    assert found.targets == expected.targets
    assert found.sums == pytest.approx(expected.sums, rel=1e-10, abs=1e-12)
    assert found.mean == pytest.approx(sum(expected.sums) / sum(expected.targets), rel=1e-12)


@pytest.mark.parametrize(
    "config", [ContextParallelConfig(), ContextParallelConfig(force=True)], ids=["plain", "forced"]
)
def test_one_process(config):
    check(evaluate(config))


@pytest.mark.distributed
@pytest.mark.parametrize(
    "config",
    [
        ContextParallelConfig(ring_degree=2),  # with dp 2, and 3 samples: one rank group gets a dummy sample
        ContextParallelConfig(ring_degree=2, ulysses_degree=2, loss_chunk_tokens=3),
        ContextParallelConfig(),  # dp 4
    ],
    ids=["dp2-ring2", "ring2-ulysses2", "dp4"],
)
def test_four_processes(world4, config):
    results = world4.run(evaluate, config)
    assert len(set(results)) == 1  # bit-equal on all ranks
    check(results[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"shuffle": True}, "shuffle=True"), ({"drop_last": True}, "drop_last=True"), ({"skip": 2}, "micro-step 2 of 3")],
    ids=str,
)
def test_refuses_a_loader_that_may_miss_documents(settings, message):
    with pytest.raises(ValueError, match=message):
        evaluate(ContextParallelConfig(), **settings)


@pytest.mark.parametrize(
    "config", [ContextParallelConfig(), ContextParallelConfig(force=True)], ids=["plain", "forced"]
)
def test_an_error_leaves_the_model_in_training_mode(config):
    comm = Communicator(ContextParallelMesh(config))
    model = apply_context_parallel(tiny_model(), config, mesh=comm.mesh).train()
    model.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
    collator = DataCollatorForContextParallel(config, max_tokens=32)
    loader = ContextParallelDataLoader(documents(), collator=collator, comm=comm)
    with pytest.raises(ZeroDivisionError):
        document_losses(model, loader, comm=comm)
    assert model.training


@pytest.mark.parametrize("chunk", [3, 1024])
def test_logits_exist_in_chunks_of_the_config(chunk):
    """`loss_chunk_tokens` counts here too."""
    config = ContextParallelConfig(force=True, loss_chunk_tokens=chunk)
    comm = Communicator(ContextParallelMesh(config))
    model, sizes = apply_context_parallel(tiny_model(), config, mesh=comm.mesh), []
    model.lm_head.register_forward_hook(lambda _, inputs, output: sizes.append(len(inputs[0])))
    collator = DataCollatorForContextParallel(config, max_tokens=32)
    losses = document_losses(model, ContextParallelDataLoader(documents(), collator=collator, comm=comm), comm=comm)
    check(losses)
    assert max(sizes) == min(chunk, 32) and sum(sizes) == sum(LENGTHS)


def test_standard_error_of_equal_documents_is_the_usual_one():
    drops = torch.tensor([0.3, 0.1, 0.4, -0.1, 0.2], dtype=torch.float64)
    before = DocumentLosses(tuple([20.0] * 5), tuple([10] * 5))
    after = DocumentLosses(tuple((20.0 - 10 * drops).tolist()), before.targets)
    found = LossDrop(before, after, required_stderr=2.0)
    assert found.drop == pytest.approx(drops.mean().item())
    assert found.stderr == pytest.approx(drops.std().item() / math.sqrt(5))
    assert found.passed  # 0.18 is 2.1 times 0.0860
    assert not LossDrop(before, after, required_stderr=3.0).passed
    assert not LossDrop(after, before, required_stderr=0.1).passed  # a rise
    assert not LossDrop(before, before, required_stderr=0.1).passed  # 0 is not above 0 +- 0
    assert LossDrop(after, before).passed  # nothing was asked for


def test_standard_error_matches_resampling_of_documents():
    """Documents of very different lengths: the formula against the spread of the drop over bootstrap samples."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(50, 2000, (60,), generator=generator)
    drops = 0.1 + 0.05 * torch.randn(60, generator=generator, dtype=torch.float64)
    before = DocumentLosses(tuple((2.0 * targets).tolist()), tuple(targets.tolist()))
    after = DocumentLosses(tuple((targets * (2.0 - drops)).tolist()), before.targets)
    samples = torch.randint(60, (20_000, 60), generator=generator)
    resampled = (targets * drops)[samples].sum(1) / targets[samples].sum(1)
    assert LossDrop(before, after).stderr == pytest.approx(resampled.std().item(), rel=0.05)


def test_refuses_losses_that_do_not_belong_together():
    one, other = DocumentLosses((1.0, 2.0), (3, 4)), DocumentLosses((1.0, 2.0), (3, 5))
    with pytest.raises(ValueError, match="different documents"):
        LossDrop(one, other)
    single = DocumentLosses((1.0, 0.0), (3, 0))
    with pytest.raises(ValueError, match="at least 2 documents"):
        LossDrop(single, single)


def peak_memory() -> list[float]:
    return peak_memory_gib(Communicator(ContextParallelMesh(ContextParallelConfig(ring_degree=2))))


@pytest.mark.distributed
def test_peak_memory_of_every_rank(world2):
    first, second = world2.run(peak_memory)
    assert first == second and len(first) == 2
    assert all(0.1 < gib < 8 for gib in first)  # torch alone takes about 0.3 GiB


def test_loss_curve_is_a_picture(tmp_path):
    plot_losses(tmp_path / "curve.png", training={1: 2.0, 2: 1.9}, held_out={0: 2.1, 2: 1.8})
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
