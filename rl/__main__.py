"""`python -m rl` is the `tandem` command."""

from rl.cli.app import main

if __name__ == "__main__":
    main()
