"""The images of terminal tasks: each task names one, or has a Dockerfile that makes it.

python -m rolljax.recipes.terminal_bench.images FOLDER docker       pulls or builds the images of all tasks
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rolljax.errors import DataError, EnvError, RolljaxError
from rolljax.recipes.terminal_bench.harbor import HarborTask, find_tasks, load_task

if TYPE_CHECKING:
    from rolljax.sandbox import ContainerHost


def in_image(task: HarborTask, host: ContainerHost) -> HarborTask:
    """Return a task as it is played in its image, which is pulled or built first if it is not there.

    Raises:
      EnvError: the image cannot be made.
    """
    image = image_of(task)
    try:
        workdir = host.provide(image, None if task.docker_image else task.build_folder, task.build_timeout_s)
    except DataError as e:
        raise EnvError(f"task {task.name}: {e}") from e
    return dataclasses.replace(
        task, image=image, workdir=workdir, artifacts=task.artifacts or (workdir,), steps=(), env={}
    )


def image_of(task: HarborTask) -> str:
    """Return the name of a task's image. That of a Dockerfile has a hash of all files next to it, so that a changed
    task gets a new image."""
    if task.docker_image:
        return task.docker_image
    name = re.sub(r"[^a-z0-9]+", "-", task.name.lower()).strip("-") or "task"
    return f"localhost/rolljax/{name}:{_hash(task.build_folder)}"


@functools.lru_cache(maxsize=8192)
def _hash(folder: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            executable = bool(path.stat().st_mode & 0o100)
            found.update(f"{path.relative_to(folder)}\0{executable}\0{path.stat().st_size}\0".encode())
            found.update(path.read_bytes())
    return found.hexdigest()[:16]


def main(argv: list[str] | None = None) -> int:
    """Make the images of all tasks of a folder; return 0 if each is there."""
    parser = argparse.ArgumentParser(description="Pull or build the images of the tasks of a folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("engine", choices=("docker", "podman"))
    args = parser.parse_args(argv)
    from rolljax.sandbox import container_host

    failed = 0
    try:
        host = container_host(args.engine)
        tasks = [load_task(folder.absolute()) for folder in find_tasks(args.folder)]
    except RolljaxError as e:
        sys.stderr.write(f"{e}\n")
        return e.exit_code
    for i, task in enumerate(tasks):
        try:
            said = in_image(task, host).image
        except RolljaxError as e:
            failed += 1
            said = str(e)
        sys.stdout.write(f"{i + 1} of {len(tasks)}  {task.name}: {said}\n")
        sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
