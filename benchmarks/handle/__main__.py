"""`python -m benchmarks.handle`."""

import sys

from benchmarks.handle.main import main

sys.exit(main())
