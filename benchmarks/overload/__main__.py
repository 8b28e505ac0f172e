"""`python -m benchmarks.overload`."""

import sys

from benchmarks.overload.main import main

sys.exit(main())
