"""What the template of the tests' processes has imported (template.py): all that is slow, and nothing that computes.

Not DeepSpeed: it looks at its variables while it is imported, and most tests do without it.
"""

import gc

import datasets  # noqa: F401
import peft  # noqa: F401
import transformers.integrations.deepspeed  # noqa: F401
import trl  # noqa: F401
from transformers import (  # noqa: F401
    LlamaForCausalLM,
    MistralForCausalLM,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
)

import hf_cp.tools.cli  # noqa: F401
import hf_cp.training  # noqa: F401
import tests.distributed.worker  # noqa: F401
import tests.training.tiny  # noqa: F401

# Every collection in a fork would visit all that is imported here, and by that copy its memory: half of a test's time.
gc.collect()
gc.freeze()
