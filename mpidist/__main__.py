"""``python -m mpidist``: the ``mpidist`` command, if its folder is not on the PATH."""

from mpidist.cli.command import main

if __name__ == "__main__":
    main()
