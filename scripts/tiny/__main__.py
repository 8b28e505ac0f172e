"""`python -m scripts.tiny --seed 0`: trains the built-in model on this machine's two cores and writes it."""

from scripts.tiny.run import main

if __name__ == "__main__":
    main()
