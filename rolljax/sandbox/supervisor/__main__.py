"""`python -I -S rolljax/sandbox/supervisor FD`: the supervisor as a program, with a socket to the host.

Nothing but the standard library and this folder is loaded: `rolljax` and `rolljax.sandbox` are here packages without
their `__init__.py`, so that the process stays small and needs no site-packages.
"""

import os
import sys
import types


def run() -> None:
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path.pop(0)  # this folder: its modules go by their full names
    for name in ("rolljax.sandbox.supervisor", "rolljax.sandbox", "rolljax"):
        package = types.ModuleType(name)
        package.__path__ = [folder]
        sys.modules[name] = package
        folder = os.path.dirname(folder)
    from rolljax.sandbox.supervisor.supervisor import main

    main()


if __name__ == "__main__":
    run()
