"""What a run stood on: the model, the documents, the versions, the machine and the processes, as short texts.

`inputs` decide which numbers are right: if one of them differs, two runs cannot be compared. `setup` is everything
that should not matter beyond rounding: if numbers differ, what differs here is the suspect.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hf_cp.environment import collect_environment
from hf_cp.models.patch import base_causal_lm, context_parallel_state

_CONFIG_IGNORED = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation_internal")


class Change(NamedTuple):
    """An entry that is not what it was."""

    name: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.name} {self.before} -> {self.now}"


@dataclass(frozen=True)
class Fingerprint:
    """Named texts.

    Args:
        inputs (`Mapping[str, str]`): digests of model config, weights (after seeded initialisation), tokenizer and
            documents, and the type of the weights.
        setup (`Mapping[str, str]`): versions, device, attention of the untouched model, kernel, processes, layout.
    """

    inputs: Mapping[str, str]
    setup: Mapping[str, str]

    @classmethod
    def of(
        cls, model: torch.nn.Module, documents: Sequence[Mapping[str, Any]], *, tokenizer: Any = None
    ) -> Fingerprint:
        """Of this process, now.

        Args:
            model (`torch.nn.Module`): patched or not.
            documents (sequence of mappings): as [`verify_context_parallel`] takes them.
            tokenizer (*optional*): that made the documents.
        """
        base, state = base_causal_lm(model), context_parallel_state(model)
        inputs = {
            "model config": _digest(_config_text(base.config)),
            "weights": weights_digest(model),
            "tokenizer": "none" if tokenizer is None else _digest(_tokenizer_text(tokenizer)),
            "documents": documents_digest(documents),
        }
        device = next(model.parameters()).device
        setup = {
            "python": platform.python_version(),
            **{name: version or "none" for name, version in collect_environment({}).packages.items()},
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "attention": base.config._attn_implementation if state is None else state.attn_implementation,
            "processes": "1, untouched" if state is None else repr(state.mesh).partition(", rank")[0] + ")",
        }
        if state is not None:
            config = state.config
            setup |= {"kernel": state.kernel_name or config.kernel, "layout": config.resolved_layout}
            setup |= {"ring_comm": config.ring_comm, "grad_comm_dtype": config.grad_comm_dtype}
        return cls(inputs, setup)

    def changed_inputs(self, before: Fingerprint) -> list[Change]:
        """Entries of `inputs` that are not as before."""
        return _changes(before.inputs, self.inputs)

    def changed_setup(self, before: Fingerprint) -> list[Change]:
        """Entries of `setup` that are not as before."""
        return _changes(before.setup, self.setup)


def weights_digest(model: torch.nn.Module) -> str:
    """Of names, types, shapes and values of all parameters."""
    digest = hashlib.blake2b(digest_size=8)
    for name, p in model.named_parameters():
        digest.update(f"{name}/{p.dtype}/{tuple(p.shape)}".encode())
        digest.update(p.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def documents_digest(documents: Sequence[Mapping[str, Any]]) -> str:
    """Of token ids and labels, in order."""
    plain = [[list(map(int, d["input_ids"])), list(map(int, d.get("labels", d["input_ids"])))] for d in documents]
    return _digest(json.dumps(plain))


def _changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[Change]:
    names = dict.fromkeys([*before, *now])
    pairs = {name: (before.get(name, "none"), now.get(name, "none")) for name in names}
    return [Change(name, *pair) for name, pair in pairs.items() if pair[0] != pair[1]]


def _config_text(config: Any) -> str:
    kept = {key: value for key, value in config.to_dict().items() if key not in _CONFIG_IGNORED}
    return json.dumps(kept, sort_keys=True, default=str)


def _tokenizer_text(tokenizer: Any) -> str:
    """What decides the ids: the whole fast tokenizer, or the vocabulary of a slow one; and the chat template."""
    is_fast = tokenizer.is_fast
    rules = tokenizer.backend_tokenizer.to_str() if is_fast else json.dumps(sorted(tokenizer.get_vocab().items()))
    return rules + str(tokenizer.chat_template)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
