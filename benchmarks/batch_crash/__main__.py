"""`python -m benchmarks.batch_crash`."""

import sys

from benchmarks.batch_crash.main import main

sys.exit(main())
