"""`python -m benchmarks.autoscaling`."""

from benchmarks.autoscaling.main import main

if __name__ == "__main__":
    main()
