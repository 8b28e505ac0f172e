"""`python -m benchmarks.cache_timing`."""

import sys

from benchmarks.cache_timing.main import main

sys.exit(main())
