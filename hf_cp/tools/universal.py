"""`hf-cp universal`: lets a ZeRO checkpoint go on with another number of processes.

Converts it to DeepSpeed's universal format, beside its own files; resuming then works as always, with any number of
processes whose step has as many rows. Run it once, in one process, when no training uses the checkpoint.
"""

from __future__ import annotations

import argparse

from hf_cp.training.universal import make_universal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The checkpoint, and how many processes work on it."""
    parser.add_argument("checkpoint", help="a folder checkpoint-<step> of a Trainer with ZeRO stage 1, 2 or 3")
    parser.add_argument(
        "--num-workers", type=int, default=1, help="processes that read and write; each holds one part in memory"
    )


def run(args: argparse.Namespace) -> int:
    """Converts; 0 if it worked, 2 if there is no ZeRO checkpoint."""
    try:
        folder = make_universal(args.checkpoint, num_workers=args.num_workers)
    except ValueError as error:
        print(f"hf-cp universal: {error}")
        return 2
    print(f"{folder}: ready for any number of processes. Resume from {args.checkpoint}.")
    return 0
