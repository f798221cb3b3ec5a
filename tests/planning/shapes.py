"""Models that several tests plan for."""

from transformers import AutoConfig

from hf_cp.planning.model_names import MODELS
from hf_cp.planning.model_shape import ModelShape

LLAMA = AutoConfig.from_pretrained(MODELS / "llama-3.1-8b.json")
LLAMA_SHAPE = ModelShape.from_config(LLAMA)
