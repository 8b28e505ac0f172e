"""`python -m benchmarks.gpu_check`."""

import sys

from benchmarks.gpu_check.main import main

sys.exit(main(sys.argv[1:]))
