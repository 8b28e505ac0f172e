"""`python -m benchmarks.openb`."""

import sys

from benchmarks.openb.main import main

sys.exit(main())
