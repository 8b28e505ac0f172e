"""`python -m benchmarks.chaos`."""

import sys

from benchmarks.chaos.main import main

sys.exit(main())
