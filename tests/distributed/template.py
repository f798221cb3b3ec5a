"""Where the processes of the tests come from: one process that has imported everything, of which they are forks.

Importing torch, transformers, peft and trl takes seven seconds of a processor; a fork takes none. The template itself
computes nothing, so that it has no threads and no random state that a fork could inherit. Where forks are not safe
(macOS), every process imports for itself.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.context import BaseContext
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
USES_FORKS = sys.platform == "linux"
ENVIRONMENT = threading.Lock()  # there is one for all threads; tests/examples/launch.py starts several scripts at once


def process_context() -> BaseContext:
    """Starts the template with the first process that is made from it; it ends with this process."""
    if not USES_FORKS:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.template_imports"])
    # It is a new interpreter: where it finds this package must not depend on where pytest was started.
    with set_variables({"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}):
        multiprocessing.forkserver.ensure_running()
    return context


@contextmanager
def set_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables of a process that is about to start: torch reads some while it is imported."""
    with ENVIRONMENT:
        saved = {key: os.environ.get(key) for key in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for key, value in saved.items():
                if value is None:
                    del os.environ[key]
                else:
                    os.environ[key] = value
