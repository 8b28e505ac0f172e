"""`python -m benchmarks.abuse`."""

import sys

from benchmarks.abuse.main import main

sys.exit(main())
