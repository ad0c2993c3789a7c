"""Becomes the command. `python -m pinfold run SCRIPT.py` runs the script by this Python."""

import os
import sys

from pinfold import command


def arguments(given):
    """Returns the arguments with this Python in front of a script that `run` shall start."""
    if given[:1] == ["run"]:
        if "--" in given:
            at = given.index("--") + 1
        else:
            words = enumerate(given)
            at = next((at for at, word in words if at > 0 and not word.startswith("-")), len(given))
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
