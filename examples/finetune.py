"""Fine-tuning from a training YAML, the same as `-m hf_cp train`; `hf_cp/recipes/train.py` is there to be read.

accelerate launch --config_file recipes/quickstart-cpu/accelerate.yaml examples/finetune.py \
    recipes/quickstart-cpu/train.yaml
"""

import sys

from hf_cp.recipes.train import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
