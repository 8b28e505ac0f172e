"""`python -m benchmarks.fairness`."""

import sys

from benchmarks.fairness.main import main

sys.exit(main())
