"""The supervisor: a small process next to the host that starts, watches and kills sandboxes. Standard library only.

`__main__.py` starts it; `supervisor.py` has its main loop; `slots.py` user ids, `cgroup.py` control groups,
`namespaces.py` mounts and networks; `watch.py` checks whether a sandbox is over its limits, `look.py` reads all its
processes at once, `freeze.py` while they are stopped, `procfs.py` the use of one process; `protocol.py` has what both
ends must agree on.
once, `freeze.py` while they are stopped, `procfs.py` what one of them uses up; `protocol.py` what both ends must agree
on.
"""
