"""The supervisor: a small process beside the host that starts, watches and kills sandboxes. Standard library only.

`__main__.py` starts it; `supervisor.py` is what it does; `slots.py` user ids, `cgroup.py` control groups,
`namespaces.py` mounts and networks, `procfs.py` what processes use up; `protocol.py` what both ends must agree on.
"""
