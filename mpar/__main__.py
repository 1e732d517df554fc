"""`python -m mpar` does the same as the command `mpar`."""

import sys

from mpar.cli.main import main

sys.exit(main())
