"""`python -m benchmarks.residue`."""

from benchmarks.residue.main import main

main()
