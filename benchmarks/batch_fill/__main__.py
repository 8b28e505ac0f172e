"""`python -m benchmarks.batch_fill`."""

import sys

from benchmarks.batch_fill.main import main

sys.exit(main())
