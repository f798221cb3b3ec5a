"""What a diagnosis looks at, gathered once a comparison has failed: which tokens and parameters are wrong, and where.

One more experiment is made: logits without position embeddings. If the group agrees with one process then, nothing but
positions can be wrong.
"""

from __future__ import annotations

import contextlib

import torch

from hf_cp.config import head_counts
from hf_cp.models.patch import base_causal_lm
from hf_cp.verify.diagnosis import Evidence
from hf_cp.verify.errors import alignment, tensor_errors
from hf_cp.verify.measure import Measured, errors_in_row_order
from hf_cp.verify.runs import LOW_PRECISION, Row, in_fp32, without_rope


def evidence(row: Row, m: Measured) -> Evidence:
    """What the diagnosis looks at. All processes must call it: one forward pass is made."""
    mesh, layout, allowed = row.mesh, row.layout, m.allowed
    factor, _ = alignment(m.reference.gradients, m.group.gradients)
    base = base_causal_lm(row.model)
    _, num_kv_heads = head_counts(base.config)
    is_low = row.dtype in LOW_PRECISION
    unscaled = tensor_errors(m.reference.gradients, m.group.gradients, rms=is_low, factor=factor or 1.0)
    return Evidence(
        cp_size=mesh.cp_size,
        dp_size=mesh.dp_size,
        ring_degree=mesh.ring_size,
        has_kv_replicas=num_kv_heads % mesh.ulysses_size != 0,
        num_layers=len(base.get_decoder().layers),
        num_targets=(row.num_targets, m.num_targets),
        doc_lengths=layout.doc_lengths,
        is_cut=_cut_documents(row),
        at_edge=_edges(row),
        copies=m.copies.cpu(),
        wrong_logits=~(m.tokens.logits <= allowed.logits).cpu(),
        wrong_losses=~(m.tokens.losses <= allowed.token_loss).cpu(),
        leaks=m.leaks,
        alone_is_right=bool((m.alone_tokens.logits <= allowed.logits).all()),
        is_right_without_rope=_is_right_without_rope(row, m),
        gradient_factor=factor,
        is_one_factor=all(error <= allowed.gradients[name] for name, error in unscaled.items()),
        factor_tolerance=0.05 if is_low else 1e-3,
        is_wrong={name: not error <= allowed.gradients[name] for name, error in m.errors.gradients.items()},
        parameter_apart=m.parameter_apart if m.distance_apart else "",
    )


def _is_right_without_rope(row: Row, m: Measured) -> bool:
    """Whether logits agree when position embeddings do nothing: then only positions can be wrong."""
    decoder = base_causal_lm(row.model).get_decoder()
    if not hasattr(decoder, "rotary_emb"):
        return False
    with without_rope(decoder):
        with in_fp32(row.model) if row.dtype in LOW_PRECISION else contextlib.nullcontext():
            logits = row.untouched_logits()
        errors = errors_in_row_order(row, logits, row.group_logits(), m.scale)
    return bool((errors <= m.allowed.logits).all())


def _edges(row: Row) -> torch.Tensor:
    """bool [num_tokens]: the document goes on after the token, but the next slot of its shard holds something else."""
    layout = row.layout
    at_edge = torch.zeros(layout.num_tokens, dtype=torch.bool)
    for cp_rank in range(layout.cp_size):
        indices = layout.indices(cp_rank)
        following = torch.cat([indices[1:], indices.new_tensor([-1])])
        at_edge[indices[(indices >= 0) & (following != indices + 1)]] = True
    at_edge[layout.cu_seqlens[1:].long() - 1] = False
    return at_edge


def _cut_documents(row: Row) -> tuple[bool, ...]:
    """Whether the tokens of a document are on more than one process."""
    holders = [set(row.layout.document_ids(rank).tolist()) for rank in range(row.layout.cp_size)]
    return tuple(sum(document in held for held in holders) > 1 for document in range(len(row.layout.doc_lengths)))
