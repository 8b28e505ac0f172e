"""`python -m benchmarks.strategies`."""

import sys

from benchmarks.strategies.main import main

sys.exit(main())
