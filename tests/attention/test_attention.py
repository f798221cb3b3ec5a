"""Outputs and every gradient of sharded attention against one process on the whole row."""

from __future__ import annotations

import itertools
from math import lcm
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_cp.attention.usp import context_parallel_attention
from hf_cp.config import ContextParallelConfig
from hf_cp.distributed.mesh import ContextParallelMesh
from hf_cp.sequence.layout import SequenceLayout
from tests.attention.cases import LAYOUTS, RING_COMMS, Case, Meshes, errors, gather_shards, run_attention
from tests.attention.reference import Attention, random_row, reference_attention, relative_error, rms_error, visible

pytestmark = pytest.mark.distributed

ROWS = ((16,), (7,), (1,), (3, 5), (1, 2, 13), (1,) * 8, (5, 1, 7, 30, 2), (64, 9))
HEADS = ((4, 2), (4, 4), (4, 1), (8, 2))
DEGREES = {1: ((1, 1),), 2: ((2, 1), (1, 2)), 3: ((3, 1),), 4: ((4, 1), (2, 2), (1, 4))}


def layouts_of(ring: int) -> tuple[str, ...]:
    """Without a ring, all layouts and engines are the same."""
    return LAYOUTS if ring > 1 else LAYOUTS[:1]


def all_cases(world_size: int) -> list[Case]:
    """Every layout and engine with every row, every layout with every special; what is left takes turns."""
    heads, kernels = itertools.cycle(HEADS), itertools.cycle(("sdpa", "eager", "sdpa"))  # 3 meets 8 rows in any order
    cases = [
        Case(row, *next(heads), 8, ring, ulysses, layout, next(kernels), ring_comm=ring_comm)
        for ring, ulysses in DEGREES[world_size]
        for layout in layouts_of(ring)
        for ring_comm in (RING_COMMS if ring > 1 else RING_COMMS[:1])
        for row in ROWS
    ]
    pairs = list(itertools.product(RING_COMMS, ("sdpa", "eager")))
    turns = itertools.cycle([*pairs, pairs[0]])  # 7 meet 8 specials in any order
    return cases + [
        Case((9, 1, 33), 8, 4, 8, ring, ulysses, layout, kernel, **{"ring_comm": ring_comm, **special})
        for ring, ulysses in DEGREES[world_size]
        for layout in layouts_of(ring)
        for special in (
            {"causal": False},
            {"window": 1},
            {"window": 5},
            {"window": 20},
            {"window": 33},
            {"scale": 0.3},
            {"head_chunks": 2 if ulysses < 4 else 1},
            {"ring_comm": "auto"},
        )
        for ring_comm, kernel in (next(turns),)
    ]


def assert_exact(cases: list[Case], per_rank: list[list[dict[str, float]]], tolerance: float = 1e-10) -> None:
    for results in per_rank:
        for case, result in zip(cases, results, strict=True):
            assert max(result.values()) < tolerance, f"{case}: {result}"


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_degree_layout_and_kernel_is_exact(request, world_size):
    world = request.getfixturevalue(f"world{world_size}")
    cases = all_cases(world_size)
    assert_exact(cases, world.run(errors, cases, timeout=110))


@st.composite
def random_cases(draw, world_size: int) -> Case:
    """Any row, heads, split, layout, engine and kernel that fit together."""
    ring, ulysses = draw(st.sampled_from(DEGREES[world_size]))
    heads = [pair for pair in ((4, 2), (4, 1), (8, 2), (9, 3), (28, 4), (8, 4)) if pair[0] % ulysses == 0]
    num_heads, num_kv_heads = draw(st.sampled_from(heads))
    kv_heads_of_rank = lcm(num_kv_heads, ulysses) // ulysses
    causal = draw(st.booleans())
    return Case(
        tuple(draw(st.lists(st.one_of(st.integers(1, 3), st.integers(1, 40)), min_size=1, max_size=6))),
        num_heads, num_kv_heads, 8, ring, ulysses,
        draw(st.sampled_from(LAYOUTS)),
        draw(st.sampled_from(("sdpa", "eager"))),
        causal,
        draw(st.one_of(st.none(), st.integers(1, 20))) if causal else None,
        ring_comm=draw(st.sampled_from((*RING_COMMS, "auto"))),
        head_chunks=draw(st.sampled_from([c for c in (1, 2, 3, 4) if kv_heads_of_rank % c == 0])),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
@given(data=st.data())
@settings(max_examples=3, suppress_health_check=list(HealthCheck))
def test_random_combinations_are_exact(request, world_size, data):
    world = request.getfixturevalue(f"world{world_size}")
    cases = data.draw(st.lists(random_cases(world_size), min_size=20, max_size=20))
    assert_exact(cases, world.run(errors, cases, timeout=60))


def test_heads_that_need_replication(world4):
    """K/V heads that the Ulysses degree does not divide: the gradients of the replicas are summed."""
    heads = ((8, 2), (28, 4), (12, 3), (4, 1), (12, 6))
    cases = [Case((5, 19), *h, ulysses_degree=4) for h in heads]
    cases += [Case((5, 19), *h, ring_degree=2, ulysses_degree=2) for h in ((6, 2), (6, 3), (2, 1))]
    cases += [Case((5, 19), *h, ring_degree=4) for h in ((7, 7), (9, 3))]
    for num_heads, num_kv_heads in ((6, 2), (28, 4), (7, 7)):
        model_config = SimpleNamespace(num_attention_heads=num_heads, num_key_value_heads=num_kv_heads)
        auto = ContextParallelConfig.auto(4, model_config)
        assert auto.cp_size == 4
        cases.append(Case((5, 19), num_heads, num_kv_heads, 8, auto.ring_degree, auto.ulysses_degree))
    assert_exact(cases, world4.run(errors, cases))


def refuse_heads(num_heads: int, num_kv_heads: int) -> None:
    config = ContextParallelConfig(ulysses_degree=4)
    layout, mesh = SequenceLayout([8], config), ContextParallelMesh(config)
    q, k = torch.zeros(2, num_heads, 8), torch.zeros(2, num_kv_heads, 8)
    context_parallel_attention(q, k, k, mesh=mesh, layout=layout)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 2), (7, 7)])
def test_heads_that_do_not_divide_are_refused_on_every_rank(world4, num_heads, num_kv_heads):
    for error in world4.run(refuse_heads, num_heads, num_kv_heads, timeout=10, expect_error=True):
        assert error.type_name == "ValueError"
        assert f"ulysses_degree=4 does not divide the {num_heads} query heads" in error.message
        assert "must divide the query heads" in error.message


def mean_of_visible_positions(ulysses_inside: bool) -> None:
    """V is one-hot of the position and all scores are equal: row p must be 1 / (p + 1) on 0..p."""
    config = ContextParallelConfig(ring_degree=2, ulysses_degree=2)
    ranks = [[[0, 1], [2, 3]]] if ulysses_inside else [[[0, 2], [1, 3]]]
    mesh, layout = ContextParallelMesh(config, ranks=ranks), SequenceLayout([16], config)
    zeros = torch.zeros(layout.local_length, 2, 16)
    one_hot = layout.shard(torch.eye(16).unsqueeze(1).expand(16, 2, 16).contiguous(), mesh.cp_rank)
    out = context_parallel_attention(zeros, zeros, one_hot, mesh=mesh, layout=layout)
    positions = layout.indices(mesh.cp_rank)
    expected = (torch.arange(16) <= positions[:, None]) / (positions[:, None] + 1)
    for head in range(2):
        assert torch.allclose(out[:, head], expected, atol=1e-6)


@pytest.mark.parametrize("ulysses_inside", [True, False])
def test_each_position_is_on_the_rank_that_holds_it(world4, ulysses_inside):
    world4.run(mean_of_visible_positions, ulysses_inside)


def rings_with_different_rows(ranks: list, ring_comm: str) -> None:
    """Every dp replica has its own row, and its own result."""
    case = Case((16,), ring_degree=2, ring_comm=ring_comm)
    mesh = ContextParallelMesh(case.config, ranks=ranks)
    layout = SequenceLayout((16 + 3 * mesh.dp_rank,), case.config)
    row = random_row(layout.num_tokens, 4, 2, 8, seed=mesh.dp_rank)
    actual, _ = run_attention(row, layout, mesh, case)
    expected = reference_attention(*row, layout.doc_lengths)
    assert max(relative_error(a, e) for a, e in zip(actual, expected, strict=True)) < 1e-10


@pytest.mark.parametrize("ring_comm", RING_COMMS)
@pytest.mark.parametrize("ranks", [[[[0], [1]], [[2], [3]]], [[[0], [2]], [[1], [3]]], [[[3], [0]], [[2], [1]]]])
def test_rings_inside_consecutive_strided_and_reversed_groups(world4, ranks, ring_comm):
    world4.run(rings_with_different_rows, ranks, ring_comm)


def views_and_slices(ring_degree: int, ulysses_degree: int) -> None:
    """q, k, v as slices of one fused tensor and as transposed views, against contiguous ones."""
    config = ContextParallelConfig(ring_degree=ring_degree, ulysses_degree=ulysses_degree)
    mesh, layout = ContextParallelMesh(config), SequenceLayout([5, 11], config)
    fused = torch.randn(layout.local_length, 8, 8)  # 4 query heads, 2 + 2 K/V heads, other values on every rank
    slices = fused.split([4, 2, 2], dim=1)
    transposed = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in slices]
    results = []
    for q, k, v in (slices, transposed, [x.contiguous() for x in slices]):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = context_parallel_attention(*leaves, mesh=mesh, layout=layout)
        out.backward(torch.ones_like(out).transpose(0, 1).contiguous().transpose(0, 1))
        results.append([out.detach(), *(x.grad for x in leaves)])
    for other in results[:2]:
        assert all(a.equal(b) for a, b in zip(other, results[2], strict=True))


@pytest.mark.parametrize(("ring_degree", "ulysses_degree"), [(2, 1), (1, 2)])
def test_non_contiguous_inputs_change_nothing(world2, ring_degree, ulysses_degree):
    world2.run(views_and_slices, ring_degree, ulysses_degree)


def changed_positions(case: Case) -> list[int]:
    """Tokens whose output changes with the first token of the first document."""
    mesh, layout = ContextParallelMesh(case.config), SequenceLayout(case.doc_lengths, case.config)
    row = random_row(layout.num_tokens, 4, 2, 8)
    before, _ = run_attention(row, layout, mesh, case)
    for x in row[:3]:
        x[0] += 1
    after, _ = run_attention(row, layout, mesh, case)
    return (before.out != after.out).flatten(1).any(1).nonzero().flatten().tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("ring_degree", "ulysses_degree"), [(2, 1), (1, 2)])
def test_nothing_leaks_into_another_document(world2, layout, ring_degree, ulysses_degree):
    case = Case((8, 8), ring_degree=ring_degree, ulysses_degree=ulysses_degree, layout=layout)
    assert world2.run(changed_positions, case) == [list(range(8))] * 2


def swapped_documents(cases: list[Case]) -> float:
    """Largest difference between documents in one order and in another: a batch's rows do not see each other."""
    meshes, differences = Meshes(), []
    for case in cases:
        mesh, layout = meshes.of(case), SequenceLayout(case.doc_lengths, case.config)
        row = random_row(layout.num_tokens, 4, 2, 8)
        first, _ = run_attention(row, layout, mesh, case)
        second, _ = run_attention([torch.cat(x.chunk(3)[::-1]) for x in row], layout, mesh, case)
        pairs = zip(first, second, strict=True)
        differences += [float((a - torch.cat(b.chunk(3)[::-1])).abs().max()) for a, b in pairs]
    return max(differences)


def test_swapping_the_rows_of_a_batch_swaps_their_outputs(world4):
    degrees = ((4, 1), (2, 2), (1, 4))
    cases = [Case((8, 8, 8), 4, 2, 8, *pair, layout) for pair in degrees for layout in LAYOUTS]
    assert max(world4.run(swapped_documents, cases)) < 1e-13


def gradcheck(case: Case) -> None:
    """Gradients of <out, grad_out> against central differences, every optional argument given."""
    mesh, layout = ContextParallelMesh(case.config), SequenceLayout(case.doc_lengths, case.config)
    row = random_row(layout.num_tokens, 2, 1, 8)
    exact, _ = run_attention(row, layout, mesh, case)

    def value(moved: list[torch.Tensor]) -> float:
        local = (layout.shard(x, mesh.cp_rank) for x in moved)
        out = context_parallel_attention(
            *local,
            mesh=mesh,
            layout=layout,
            causal=True,
            window=4,
            scale=case.scale,
            kernel=case.kernel,
            config=case.config,
        )
        return float((layout.unshard(gather_shards(out, mesh)) * row[3]).sum())

    for index, gradient in enumerate(exact[1:]):
        for entry in range(gradient.numel()):
            step = torch.zeros(gradient.numel(), dtype=torch.float64)
            step[entry] = 1e-5
            plus, minus = (
                value([x + sign * step.view_as(x) if i == index else x for i, x in enumerate(row[:3])])
                for sign in (1, -1)
            )
            assert abs((plus - minus) / 2e-5 - gradient.flatten()[entry].item()) < 1e-8


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_numerical_gradients(world2, kernel):
    world2.run(gradcheck, Case((4,), ring_degree=2, kernel=kernel, scale=0.5))
    world2.run(gradcheck, Case((4,), ulysses_degree=2, kernel=kernel, scale=0.5))


def padding_gets_no_gradient() -> None:
    case = Case((7,), ring_degree=2)
    mesh, layout = ContextParallelMesh(case.config), SequenceLayout(case.doc_lengths, case.config)
    q, k, v = (torch.randn(4, h, 8, requires_grad=True) for h in (4, 2, 2))
    out = context_parallel_attention(q, k, v, mesh=mesh, layout=layout, config=case.config)
    out.backward(torch.ones_like(out))
    is_padding = layout.indices(mesh.cp_rank) < 0
    assert int(is_padding.sum()) == (1 if mesh.cp_rank == 0 else 0)
    assert out.requires_grad
    assert all(not x.grad[is_padding].any() for x in (q, k, v))


def test_padding_gets_no_gradient(world2):
    world2.run(padding_gets_no_gradient)


class Swapped(SequenceLayout):
    """Says that the first two tokens of a shard lie the other way round."""

    def indices(self, cp_rank: int) -> torch.Tensor:
        return super().indices(cp_rank)[[1, 0, 2, 3, 4, 5, 6, 7]]


def shuffled_shards_are_wrong() -> list[float]:
    """A planted fault: one rank swaps two of its slots. The comparison must see it."""
    case = Case((16,), ring_degree=2)
    mesh, layout = ContextParallelMesh(case.config), SequenceLayout(case.doc_lengths, case.config)
    row = random_row(16, 4, 2, 8)
    swapped = layout if mesh.cp_rank else Swapped((16,), case.config)
    actual, _ = run_attention(row, swapped, mesh, case)
    expected = reference_attention(*row, (16,))
    return [relative_error(a, e) for a, e in zip(actual, expected, strict=True)]


def test_the_comparison_sees_a_wrong_order(world2):
    assert all(error > 1e-3 for error in world2.run(shuffled_shards_are_wrong)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_as_good_as_one_process(world1, world2, world4, dtype):
    """At most 1.5 times the error that one process makes in the same dtype, both against fp64."""
    rows, heads = (200, 56), (4, 2)
    single = world1.run(errors, [Case(rows, *heads)], dtype, rms_error)[0][0]
    for world, degrees in ((world2, DEGREES[2]), (world4, DEGREES[4])):
        cases = [Case(rows, *heads, ring_degree=r, ulysses_degree=u) for r, u in degrees]
        for case, result in zip(cases, world.run(errors, cases, dtype, rms_error)[0], strict=True):
            ratios = {name: result[name] / single[name] for name in Attention._fields}
            assert max(ratios.values()) < 1.5, f"{case}: {ratios}"


def test_reference_sees_only_visible_keys():
    """The reference itself, checked by hand: equal scores give means over what is visible."""
    zeros, values = torch.zeros(5, 1, 2), torch.arange(5.0).view(5, 1, 1).expand(5, 1, 2)
    out = reference_attention(zeros, zeros, values, values, (2, 3)).out
    assert out[:, 0, 0].tolist() == [0.0, 0.5, 2.0, 2.5, 3.0]
    assert visible((2, 3), window=2)[4].tolist() == [False, False, False, True, True]


def under_autocast(is_backward_inside: bool) -> float:
    """fp32 queries and keys with bf16 values, as a model under autocast has them; error against fp64."""
    case = Case((30, 10), ring_degree=2, kernel="eager")
    mesh, layout = ContextParallelMesh(case.config), SequenceLayout(case.doc_lengths, case.config)
    row = random_row(40, 4, 2, 8, torch.bfloat16)
    q, k, v, grad_out = (layout.shard(x, mesh.cp_rank) for x in row)
    leaves = [x.requires_grad_() for x in (q.float(), k.float(), v)]
    with torch.autocast("cpu", torch.bfloat16):
        out = context_parallel_attention(*leaves, mesh=mesh, layout=layout, config=case.config)
    assert out.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16, enabled=is_backward_inside):
        out.backward(grad_out)
    expected = reference_attention(*(x.double() for x in row), case.doc_lengths)
    local = (out.detach(), *(x.grad for x in leaves))
    whole = [layout.unshard(gather_shards(x, mesh)) for x in local]
    return max(rms_error(a.double(), e) for a, e in zip(whole, expected, strict=True))


def test_autocast_decides_the_dtype_but_not_the_sums(world2):
    for is_backward_inside in (False, True):  # one rounding to bf16; products in bf16 would give more
        assert max(world2.run(under_autocast, is_backward_inside)) < 3e-3
