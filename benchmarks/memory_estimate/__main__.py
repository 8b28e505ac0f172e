"""`python -m benchmarks.memory_estimate`."""

from benchmarks.memory_estimate.main import main

main()
