"""Pinfold, a memory allocator on per-CPU caches, for this Python and other programs."""

import os

_HERE = os.path.dirname(os.path.abspath(__file__))


def command():
    """Returns the path of the command."""
    return os.path.join(_HERE, "bin", "pinfold")


def shared_library():
    """Returns the path of the library, for the environment variable LD_PRELOAD."""
    return os.path.join(_HERE, "lib", "libpinfold.so.0")
