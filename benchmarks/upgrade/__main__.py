"""`python -m benchmarks.upgrade`."""

import sys

from benchmarks.upgrade.main import main

sys.exit(main(sys.argv[1:]))
