"""Checks of `hf-cp doctor` about what is installed, and about the model."""

from __future__ import annotations

import contextlib
import os
import re
from importlib import metadata
from pathlib import Path

import torch
from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from packaging.version import Version
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from hf_cp.attention.kernels import choose_kernel
from hf_cp.config import ContextParallelConfig, check_heads, head_counts, head_size
from hf_cp.environment import version_of
from hf_cp.models.patch import base_causal_lm
from hf_cp.models.supported import check_model
from hf_cp.planning.model_names import HUB_NAMES, has_sizes_only, missing_weights
from hf_cp.planning.model_shape import layer_windows
from hf_cp.tools.doctor.check import UNREADABLE, Check, Finding, NotGiven, fail, missing, ok, skip, warn
from hf_cp.tools.doctor.subject import Subject

WEIGHT_FILES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)


def check_versions(subject: Subject) -> Finding:
    """Installed versions against the floors of the package, which are what its tests run with."""
    names = ["torch", "transformers", "accelerate", "numpy"]
    with contextlib.suppress(NotGiven, *UNREADABLE):  # the check of that file says so
        names += ["deepspeed"] if subject.backend == "DEEPSPEED" else []
        names += ["peft"] if subject.train.get("lora_r") else []
    floors, found = _floors(), {name: version_of(name) for name in names}
    shown = ", ".join(f"{name} {version or 'missing'}" for name, version in found.items())
    absent = [name for name, version in found.items() if version is None]
    if absent:
        return fail(shown, f"pip install {' '.join(absent)}")
    old = [f"{name}>={floors[name]}" for name, version in found.items()
           if name in floors and Version(version) < Version(floors[name])]  # fmt: skip
    if old:
        return warn(f"{shown}: older than what the tests run with", f"pip install {' '.join(map(repr, old))}")
    return ok(shown if floors else f"{shown} (hf-cp is not installed as a package: no floors to compare with)")


def _floors() -> dict[str, str]:
    """Package -> oldest version, from this package's own metadata; empty in a checkout that is not installed."""
    try:
        requirements = metadata.requires("hf-cp") or []
    except metadata.PackageNotFoundError:
        return {}
    pairs = (re.match(r"([\w.-]+)\s*>=\s*([\w.]+)", text) for text in requirements)
    return {pair[1].lower(): pair[2] for pair in pairs if pair}


def check_devices(subject: Subject) -> Finding:
    """As many accelerators as processes of a machine."""
    needed, count = subject.ranks_per_node, torch.cuda.device_count()
    if subject.wants_cpu:
        return ok(f"CPU: {os.cpu_count()} cores for {needed} processes of a machine")
    if count == 0:
        return warn(
            f"no GPU on this machine, {needed} wanted per machine: kernel and memory cannot be checked here",
            "Run the doctor where the training will run.",
        )
    if count < needed:
        return fail(f"{count} GPUs on this machine, {needed} processes", "Lower num_processes, or add machines.")
    return ok(f"{count} x {torch.cuda.get_device_name(0)} for {needed} processes of a machine")


def check_architecture(subject: Subject) -> Finding:
    """Whether this package knows the model; heads and dropout have checks of their own."""
    model = subject.meta_model
    base = base_causal_lm(model)
    check_model(model, base, ContextParallelConfig())
    windows = sorted({window for window in layer_windows(base.config) if window})
    sliding = f", sliding windows {windows}" if windows else ""
    return ok(f"{type(base).__name__} ({base.config.model_type}), {model.num_parameters():,} parameters{sliding}")


def check_weights(subject: Subject) -> Finding:
    """Weights to start from: for all other checks the sizes of the model are enough."""
    name = subject.loaded_name
    folder, hub_name = Path(name), HUB_NAMES.get(name.lower())
    if folder.is_file():
        fix = "Set model_name_or_path to a folder with weights."
        return missing(subject, f"{name} is a file without weights", fix)
    if has_sizes_only(name):
        return missing(subject, f"{name} names sizes only", f"Set model_name_or_path: {hub_name}, or a folder.")
    if not folder.is_dir():
        return _check_hub_weights(subject, name)
    absent = missing_weights(folder)
    if absent:
        return missing(subject, f"{name} lacks {', '.join(absent)}", "Copy or download the whole model.")
    return ok(f"weights are in {name}")


def _check_hub_weights(subject: Subject, name: str) -> Finding:
    """Nothing is downloaded: whether the weights are in this machine's cache already."""
    try:
        is_cached = any(isinstance(try_to_load_from_cache(name, file), str) for file in WEIGHT_FILES)
    except HFValidationError:
        return missing(subject, f"{name} is not a folder here, nor a hub name", "Make it, or correct the name.")
    if is_cached:
        return ok(f"weights of {name} are in the cache of this machine")
    text = f"weights of {name} are not in the cache of this machine"
    fix = f"`hf download {name}` on every machine; some models need a login."
    if constants.HF_HUB_OFFLINE:
        return missing(subject, f"{text}, which is offline", fix)
    return warn(f"{text}: the start downloads them", fix)


def check_head_counts(subject: Subject) -> Finding:
    """Whether query and K/V heads divide over the Ulysses ranks, and whether another degree sends less."""
    config, (heads, kv_heads) = subject.cp, head_counts(subject.model_config)
    check_heads(heads, kv_heads, config)
    text = f"{heads} query and {kv_heads} K/V heads, ulysses_degree={config.ulysses_degree}"
    if kv_heads % config.ulysses_degree == 0:
        return ok(text)
    other = ContextParallelConfig.auto(config.cp_size, subject.model_config, subject.ranks_per_node or None)
    return warn(
        f"{text}: K/V heads are replicated, which adds traffic",
        f"ulysses_degree={other.ulysses_degree}, ring_degree={other.ring_degree} sends least.",
    )


def check_attention_dropout(subject: Subject) -> Finding:
    """There must be none: its mask depends on who computes which scores."""
    dropout = getattr(subject.model_config, "attention_dropout", 0.0) or 0.0
    if dropout:
        return fail(
            f"attention_dropout={dropout}: its random mask would differ from that of one process",
            "Set attention_dropout to 0.0 in the config that the model is made from.",
        )
    return ok("attention_dropout=0.0")


def check_positions(subject: Subject) -> Finding:
    """Positions count inside a document, so it is the longest document that must fit the model's context."""
    context = getattr(subject.model_config, "max_position_embeddings", None)
    if context is None:
        return skip("the model has no max_position_embeddings")
    try:
        lengths = subject.packed.manifest.lengths
        longest, what = max(lengths), f"the longest of {len(lengths):,} documents"
    except (NotGiven, *UNREADABLE):
        longest, what = subject.collator.max_tokens, "a document as long as max_tokens"
    if longest is None:
        return skip("neither documents nor max_tokens are known")
    text = f"{what} has {longest:,} tokens, the model's context is {context:,}"
    if longest <= context:
        return ok(text)
    factor = -(-longest // context)
    return warn(text, f"Set rope_parameters (recipes/yarn-extension) with factor {factor}, or truncate.")


def check_kernel(subject: Subject) -> Finding:
    """The attention kernel that the run would get, by type, head size and device of this machine."""
    config = subject.model_config
    size = head_size(config)
    on_gpu = torch.cuda.is_available() and not subject.wants_cpu
    probe = torch.empty(1, 1, size, dtype=getattr(torch, subject.dtype_name), device="cuda" if on_gpu else "cpu")
    kernel = choose_kernel(subject.cp.kernel, probe, probe)
    text = (
        f"kernel={subject.cp.kernel} is {kernel.name} for {subject.dtype_name}, head size {size}, {probe.device.type}"
    )
    if not on_gpu and not subject.wants_cpu:
        return skip(f"{text}; that of the GPUs is not known here")
    if kernel.name == "eager":
        return warn(f"{text}: the slow reference, quadratic memory", "Use bf16 or fp16, and kernel=auto.")
    return ok(text)


CHECKS = (
    Check("Software", "versions", check_versions),
    Check("Software", "devices", check_devices),
    Check("Model", "architecture", check_architecture),
    Check("Model", "weights", check_weights),
    Check("Model", "heads", check_head_counts),
    Check("Model", "attention dropout", check_attention_dropout),
    Check("Model", "positions", check_positions),
    Check("Model", "attention kernel", check_kernel),
)
