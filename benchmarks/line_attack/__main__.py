"""`python -m benchmarks.line_attack`."""

from benchmarks.line_attack.main import main

main()
