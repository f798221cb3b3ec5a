"""hf_cp._compat on the installed versions: every private name of another library that the package reaches for."""

from __future__ import annotations

import torch
from accelerate.state import AcceleratorState, PartialState

from hf_cp import _compat


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
