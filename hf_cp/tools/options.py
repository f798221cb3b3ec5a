"""The fields of `ContextParallelConfig` as options of a command.

Invariant: the options are made from the dataclass's own fields (name, help, choices, type), so a new field is an
option of every command at once. An option that is not given falls back to its `HF_CP_` variable, then to the default.

>>> parser = argparse.ArgumentParser()
>>> add_context_parallel_arguments(parser)
>>> config_from_arguments(parser.parse_args(["--ring-degree", "2", "--no-force"])).cp_size
2
"""

from __future__ import annotations

import argparse
import dataclasses
import typing

from hf_cp.config import ENV_PREFIX, ContextParallelConfig

__all__ = ["add_context_parallel_arguments", "config_from_arguments"]


def add_context_parallel_arguments(parser: argparse.ArgumentParser, *, exclude: typing.Collection[str] = ()) -> None:
    """Adds `--ring-degree`, `--ulysses-degree`, `--layout`, ... (also with underscores), in a group of their own.

    Args:
        parser (`argparse.ArgumentParser`): of a command.
        exclude (collection of `str`, *optional*): fields that the command sets by itself.
    """
    group = parser.add_argument_group(
        "context parallelism", f"Each one may also come from its {ENV_PREFIX}... environment variable."
    )
    kinds = typing.get_type_hints(ContextParallelConfig)
    for field in dataclasses.fields(ContextParallelConfig):
        if field.name not in exclude:
            _add(group, field, kinds[field.name])


def config_from_arguments(args: argparse.Namespace, **overrides: typing.Any) -> ContextParallelConfig:
    """The config of parsed options: `overrides` win over options, options over variables, variables over defaults.

    Raises:
        ValueError: the values do not make a config (see [`ContextParallelConfig`]).
    """
    names = [field.name for field in dataclasses.fields(ContextParallelConfig)]
    given = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
    return ContextParallelConfig.from_env(**{**given, **overrides})


def _add(group: typing.Any, field: dataclasses.Field, kind: typing.Any) -> None:
    """One option; `None` means that it was not given."""
    name = field.name.replace("_", "-")
    flags = list(dict.fromkeys((f"--{name}", f"--{field.name}")))
    text = f"{field.metadata.get('help', '')} (default: {field.default})".strip().replace("%", "%%")
    if kind is bool:
        group.add_argument(*flags, dest=field.name, action=argparse.BooleanOptionalAction, default=None, help=text)
        return
    concrete = next((k for k in typing.get_args(kind) if k is not type(None)), kind)  # `float | None` -> float
    choices = field.metadata.get("choices")
    metavar = None if choices else concrete.__name__.upper()
    group.add_argument(
        *flags, dest=field.name, type=concrete, choices=choices, default=None, help=text, metavar=metavar
    )
