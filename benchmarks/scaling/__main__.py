"""`python -m benchmarks.scaling`."""

import sys

from benchmarks.scaling.main import main

sys.exit(main(sys.argv[1:]))
