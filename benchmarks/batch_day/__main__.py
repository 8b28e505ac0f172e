"""`python -m benchmarks.batch_day`."""

import sys

from benchmarks.batch_day.main import main

sys.exit(main())
