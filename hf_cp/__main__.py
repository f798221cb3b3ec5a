"""`python -m hf_cp`, for launchers that take a module: the same as `hf-cp`."""

import sys

from hf_cp.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
