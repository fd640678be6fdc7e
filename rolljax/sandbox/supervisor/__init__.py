"""The supervisor: a small process next to the host that starts, watches and kills sandboxes. Standard library only.

`__main__.py` starts it, and `supervisor.py` has its main loop. `slots.py` has user ids, `cgroup.py` control groups,
`namespaces.py` mounts and networks. `watch.py` checks whether a sandbox is over its limits, `look.py` reads all its
processes at once, `freeze.py` stops them meanwhile, and `procfs.py` reads one process. `protocol.py` has the constants
that host and supervisor share.
"""
