"""`python -m mpar` is `mpar`."""

import sys

from mpar.cli._main import main

sys.exit(main())
