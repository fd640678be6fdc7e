"""The supervisor: a small process beside the host that starts, watches and kills sandboxes. Standard library only.

`__main__.py` starts it; `supervisor.py` is what it does; `slots.py` user ids, `cgroup.py` control groups,
`namespaces.py` mounts and networks; `watch.py` whether a sandbox is over its limits, `look.py` all its processes at
once, `freeze.py` while they are stopped, `procfs.py` what one of them uses up; `protocol.py` what both ends must agree
on.
"""
