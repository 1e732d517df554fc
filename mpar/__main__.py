"""`python -m mpar` is `mpar`."""

import sys

from mpar.cli.main import main

sys.exit(main())
