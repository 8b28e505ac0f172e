"""`python -m benchmarks.limits`."""

import sys

from benchmarks.limits.main import main

sys.exit(main())
