"""`python -m benchmarks.preemption`."""

import sys

from benchmarks.preemption.main import main

sys.exit(main())
