"""Every field of the config is an option of every command; options win over variables, variables over defaults."""

from __future__ import annotations

import argparse
import dataclasses
import typing

import pytest

from hf_cp.config import ContextParallelConfig
from hf_cp.tools.options import add_context_parallel_arguments, config_from_arguments

FIELDS = dataclasses.fields(ContextParallelConfig)
KINDS = typing.get_type_hints(ContextParallelConfig)


def parse(*options: str, **kwargs) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_context_parallel_arguments(parser, **kwargs)
    return parser.parse_args(options)


def other_value(field: dataclasses.Field) -> object:
    """A value that is not the default."""
    if KINDS[field.name] is bool:
        return not field.default
    if "choices" in field.metadata:
        return next(choice for choice in field.metadata["choices"] if choice != field.default)
    kinds = typing.get_args(KINDS[field.name]) or (KINDS[field.name],)
    return 2.5 if float in kinds else 2


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for field in FIELDS:
        monkeypatch.delenv(f"HF_CP_{field.name.upper()}", raising=False)


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
@pytest.mark.parametrize("separator", ["-", "_"])
def test_every_field_is_an_option(field, separator):
    value, flag = other_value(field), "--" + field.name.replace("_", separator)
    options = [flag, str(value)]
    if isinstance(value, bool):
        options = [flag if value else flag.replace("--", "--no-")]
    if field.name == "grad_comm_dtype":
        options += ["--ring-comm", "exchange"]
    found = getattr(config_from_arguments(parse(*options)), field.name)
    assert found == value and type(found) is type(value)


def test_nothing_given_is_the_default():
    assert config_from_arguments(parse()) == ContextParallelConfig()


def test_who_wins(monkeypatch):
    for name, value in {"RING_DEGREE": "3", "LAYOUT": "zigzag", "FORCE": "1"}.items():
        monkeypatch.setenv(f"HF_CP_{name}", value)
    config = config_from_arguments(parse("--layout", "striped", "--no-force"), head_chunks=2)
    assert config == ContextParallelConfig(ring_degree=3, layout="striped", head_chunks=2)
    assert config_from_arguments(parse("--ring-degree", "2"), ring_degree=4).ring_degree == 4


def test_an_excluded_field_is_not_an_option(capsys):
    with pytest.raises(SystemExit):
        parse("--layout", "zigzag", exclude=("layout",))
    assert "--layout" in capsys.readouterr().err
    assert config_from_arguments(parse(exclude=("layout",)), layout="zigzag").layout == "zigzag"


def test_wrong_values_are_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse("--layout", "diagonal")
    assert stopped.value.code == 2 and "zigzag" in capsys.readouterr().err
    with pytest.raises(ValueError, match="ring_degree must be a positive integer, got 0"):
        config_from_arguments(parse("--ring-degree", "0"))
