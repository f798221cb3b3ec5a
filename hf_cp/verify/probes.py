"""Does one document reach another? A token is exchanged, and every logit that changes is counted.

Invariant: the patched model's own logits are compared with themselves, computed twice by the same kernels on the same
shapes, so what must not change is expected to be equal to the last bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_cp.verify.runs import Row


class Leak(NamedTuple):
    """What an exchanged token changed.

    Args:
        document, token (`int`): the token, by document and position in it.
        reached (`int`): tokens of its own document, from itself on, whose logits changed: they should.
        past (`int`): earlier tokens of its document that changed: none may.
        others (`int`): tokens of other documents that changed: none may.
    """

    document: int
    token: int
    reached: int
    past: int
    others: int


def probe_leaks(row: Row, logits: torch.Tensor) -> tuple[Leak, ...]:
    """Exchanges the middle token of the first, the longest and the last document, one at a time.

    The first can leak forward, the last backward, and the longest is the one that is cut over ranks. All processes
    must call it.

    Args:
        logits (`torch.Tensor`): [local slots, vocabulary], of the group, of the unchanged row.
    """
    lengths = row.layout.doc_lengths
    chosen = dict.fromkeys([0, lengths.index(max(lengths)), len(lengths) - 1])
    return tuple(_probe(row, logits, document) for document in chosen)


def _probe(row: Row, logits: torch.Tensor, document: int) -> Leak:
    layout, ids = row.layout, row.share["input_ids"]
    first, token = int(layout.doc_starts[document]), layout.doc_lengths[document] // 2
    is_target = (layout.indices(row.mesh.cp_rank) == first + token).to(ids.device)
    other_id = (ids + 1) % logits.shape[-1]
    changed_logits = row.group_logits(input_ids=ids.where(~is_target, other_id))
    is_changed = row.in_row_order((changed_logits != logits).any(-1)) > 0
    last = first + layout.doc_lengths[document]
    own = int(is_changed[first:last].sum())
    past = int(is_changed[first : first + token].sum())
    return Leak(document, token, own - past, past, int(is_changed.sum()) - own)
