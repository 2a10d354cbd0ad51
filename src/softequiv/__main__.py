"""`python -m softequiv` is the command `softequiv`."""

from softequiv.cli import main

if __name__ == "__main__":
    main()
