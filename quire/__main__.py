"""`python -m quire`: the same as `quire`."""

from quire.cli import main

if __name__ == "__main__":
    main()
