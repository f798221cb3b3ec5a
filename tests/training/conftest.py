"""DeepSpeed's extension is compiled before the tests that launch DeepSpeed, so it does not count as their time."""

from __future__ import annotations

import pytest

from tests.examples.launch import build_deepspeed_extension


@pytest.fixture(scope="session")
def deepspeed_extension() -> None:
    build_deepspeed_extension()
