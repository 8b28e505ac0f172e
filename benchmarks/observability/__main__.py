"""`python -m benchmarks.observability`."""

import sys

from benchmarks.observability.main import main

sys.exit(main())
