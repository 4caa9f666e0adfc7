"""`python -m partc` is `partc`."""

import os
import sys

# Python searches the working folder first, where a folder named z3 would be taken for the library that torch tries to
# import.
if sys.path and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]

from partc.cli import main

sys.exit(main())
