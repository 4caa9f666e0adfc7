"""`python -m partc` is `partc`."""

import os
import sys

# Python searches the working folder first. There, a build folder named z3 would pass for the library that torch tries.
if sys.path and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]

from partc.cli import main

sys.exit(main())
