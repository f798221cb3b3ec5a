"""The fixture that compiles DeepSpeed's extension before the launch."""

from tests.training.conftest import deepspeed_extension

__all__ = ["deepspeed_extension"]
