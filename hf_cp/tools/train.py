"""`hf-cp train`: fine-tuning from a training YAML, in every process that `accelerate launch` starts.

Invariant: the options are the keys of the YAML. They belong to three dataclasses and a file that is not read yet, so
argparse takes them here as they stand, `--help` too.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything is a plain word here; `hf_cp.recipes.settings` knows what the words mean."""
    parser.prefix_chars = "\0"
    parser.add_argument("words", nargs="*", metavar="FILE.yaml [--KEY VALUE ...]")


def run(args: argparse.Namespace) -> int:
    """Trains; the status is 1 if the proof or the result fails, 2 for settings that do not fit each other."""
    from hf_cp.recipes.train import main

    return main(args.words)
