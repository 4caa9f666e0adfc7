"""`python -m partc` is `partc`."""

import sys

from partc.cli import main

sys.exit(main())
