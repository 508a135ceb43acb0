"""`python -m moexp` is the same as the console script."""

from moexp.cli.main import main

if __name__ == "__main__":
    main()
