"""Becomes the command. `python -m pinfold run SCRIPT.py` runs the script by this Python."""

import os
import sys

from pinfold import command


def arguments(given):
    """Returns the arguments with this Python in front of a script that `run` shall start."""
    if given[:1] != ["run"]:
        return given
    # The script's own arguments may contain another `--`.
    at = 1
    while at < len(given) and given[at].startswith("-"):
        at += 1
        if given[at - 1] == "--":
            break
    if at < len(given) and given[at].endswith(".py"):
        return given[:at] + [sys.executable] + given[at:]
    return given


def main():
    path = command()
    try:
        os.execv(path, ["pinfold"] + arguments(sys.argv[1:]))
    except OSError as error:
        sys.exit(f"pinfold: cannot start {path}: {error.strerror}; reinstall the package pinfold")


if __name__ == "__main__":
    main()
