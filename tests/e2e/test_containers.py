"""Sandboxes in containers of Docker and Podman, from an image that has neither Python nor bash."""

import dataclasses
import gc
import http.server
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import textwrap
import threading
from pathlib import Path

import pytest

from rolljax.errors import ConfigError, DataError, EnvError
from rolljax.recipes.terminal_bench import images
from rolljax.recipes.terminal_bench.harbor import load_task
from rolljax.recipes.terminal_bench.terminal import HarborTasks
from rolljax.sandbox import (
    TERMINAL,
    ContainerHost,
    Sandbox,
    SandboxConfig,
    SandboxGone,
    SandboxGroup,
    SandboxHost,
    container_host,
    engine_available,
    run_served,
)
from rolljax.sandbox.containers import interpreter
from rolljax.sandbox.profile import MIB
from tests.e2e.sandbox_support import eventually, needs_sandbox

IMAGE = "localhost/rolljax-test:1"
PROGRAMS = ("sh", "cat", "ls", "rm", "mkdir", "sleep", "id", "head", "chmod", "wc", "printf", "ln")
PROFILE = dataclasses.replace(TERMINAL, memory_bytes=128 * MIB, nproc=24, image=IMAGE)


def root_file_system():
    """Return a tar file of a system with a shell and a few programs of this machine."""
    programs = [os.path.realpath(shutil.which(name)) for name in PROGRAMS]
    said = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=True).stdout
    libraries = {word for word in said.split() if word.startswith("/") and not word.endswith(":")}
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w") as tar:
        for name, path in zip(PROGRAMS, programs, strict=True):
            tar.add(path, f"bin/{name}")
        for path in libraries:
            tar.add(os.path.realpath(path), path.lstrip("/"))
        for folder in ("tmp", "root", "app", "proc", "dev"):
            info = tarfile.TarInfo(folder)
            info.type, info.mode = tarfile.DIRTYPE, 0o777
            tar.addfile(info)
    return found.getvalue()


@pytest.fixture(scope="module", params=["docker", "podman"])
def engine(request, tmp_path_factory):
    """Yield an engine that can run the image; skip where there is none."""
    name = request.param
    if reason := engine_available(name):
        pytest.skip(f"{name}: {reason}")

    def works():
        done = subprocess.run(
            [name, "run", "--rm", "--network", "none", IMAGE, "cat", "/dev/null"], capture_output=True
        )
        return done.returncode == 0

    subprocess.run([name, "import", "-", IMAGE], input=root_file_system(), capture_output=True, check=True)
    with pytest.MonkeyPatch.context() as patch:
        limits = 'default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]'
        conf = tmp_path_factory.mktemp("podman") / "containers.conf"
        conf.write_text(f'[engine]\nruntime = "runc"\n[containers]\n{limits}\n')
        if name == "podman" and not works():  # crun refuses control groups of both versions at once
            patch.setenv("CONTAINERS_CONF", str(conf))
        if not works():
            pytest.skip(f"{name} cannot run containers on this machine")
        yield name


@pytest.fixture(scope="module")
def host(engine):
    with ContainerHost(engine, SandboxConfig(slots=8)) as host:
        yield host


@pytest.fixture(scope="module")
def box(host):
    with Sandbox.open(PROFILE, host=host) as box:
        yield box


def containers(host):
    """Return the names of the containers of this engine that rolljax has started."""
    names = host.ask("ps", "--all", "--format", "{{.Names}}").stdout.split()
    return [name for name in names if name.startswith("rolljax-")]


def test_a_shell_keeps_its_state_and_uses_the_image(box):
    assert box.run("command -v python3; command -v bash; pwd").output == "/\n"
    assert box.run("cd /app; x=3").returncode == 0
    assert box.run('printf "$x " ; pwd; (exit 4)').output == "3 /app\n"
    late = box.run("sleep 30", timeout_s=0.3)
    assert late.timed_out and box.run("echo ok").output == "ok\n"


def test_programs_get_input_and_give_both_outputs_and_their_code(host, box):
    result = box.execute(["sh", "-c", "cat; echo e >&2; exit 3"], b"in")
    assert (result.returncode, result.stdout, result.stderr) == (3, b"in", b"e\n")
    result = host.run(["sh", "run.sh"], stdin=b"in", files={"run.sh": b"cat; id -u; exit 5"}, profile=PROFILE)
    assert (result.returncode, result.stdout) == (5, b"in0\n")
    brief = dataclasses.replace(PROFILE, wall_s=0.3)
    assert host.run(["sleep", "60"], profile=brief).timed_out


def test_files_go_in_and_out(box):
    box.put("/app/deep/f", b"#!/bin/sh\necho ran\n", 0o755)
    assert box.run("/app/deep/f").output == "ran\n"
    box.run("ln -s /etc/passwd /app/deep/link")
    assert box.get("/app/deep/f").startswith(b"#!/bin/sh")
    with pytest.raises(EnvError):
        box.get("/app/deep/link")
    assert box.list_files(["/app/deep"]) == [
        ("d", 0o755, "/app/deep"),
        ("f", 0o755, "/app/deep/f"),
        ("o", 0o777, "/app/deep/link"),
    ]
    assert box.list_files(["/app/deep", "/none"], below=False) == [("d", 0o755, "/app/deep")]


def test_what_a_sandbox_cannot_do(box):
    python = " ".join(interpreter().python)
    reach = "import socket; socket.create_connection(('192.0.2.1', 80), 2)"
    assert "unreachable" in box.run(f'{python} -c "{reach}"').output
    status = dict(line.split(":", 1) for line in box.run("cat /proc/self/status").output.splitlines() if ":" in line)
    assert status["NoNewPrivs"].strip() == "1" and status["Seccomp"].strip() == "2"
    allowed = int(status["CapBnd"], 16)
    assert not allowed & (1 << 21 | 1 << 19 | 1 << 12 | 1 << 13 | 1 << 27)  # admin, ptrace, network, raw, mknod
    assert box.run("ls /home /work").returncode != 0  # nothing of this machine
    assert box.run("echo x > /run/rolljax/agent.py").returncode != 0
    assert box.run(f"echo x > {interpreter().mounts[0][1]}").returncode != 0
    agent = "for p in /proc/[0-9]*; do cat $p/environ > /dev/null || echo refused; done 2> /dev/null"
    assert "refused" in box.run(agent).output


def test_memory_and_processes_are_limited(host):
    with Sandbox.open(PROFILE, host=host) as box:
        code = "import os, time\nwhile os.fork(): pass\ntime.sleep(0.5)"
        forks = box.execute([*interpreter().python, "-c", code])
        assert b"BlockingIOError" in forks.stderr
    with Sandbox.open(PROFILE, host=host) as box:
        python = " ".join(interpreter().python)
        assert box.run(f'{python} -c "x = bytes(1 << 20) * 1000"; echo code $?').output.endswith("code 137\n")
        assert box.run("echo alive").output == "alive\n"


def test_orphans_are_buried(box):
    before = box.num_processes()
    assert box.run("for i in 1 2 3 4; do (sleep 0.01 &) ; done").returncode == 0
    assert eventually(lambda: box.num_processes() == before)
    assert box.stats()["processes"] == before


def test_changes_and_an_image_of_them(host):
    with Sandbox.open(PROFILE, host=host) as box:
        box.run("echo new > /app/new; rm /bin/wc; echo x >> /bin/ls")
        found = set(box.changes())
        assert {("A", "/app/new"), ("D", "/bin/wc"), ("C", "/bin/ls"), ("C", "/bin")} <= found
        assert not any(path.startswith("/lib") for _, path in found)
        assert box.commit("localhost/rolljax-test:snapshot") == "localhost/rolljax-test:snapshot"
    snapshot = dataclasses.replace(PROFILE, image="localhost/rolljax-test:snapshot")
    with Sandbox.open(snapshot, host=host) as box:
        assert box.run("cat /app/new; command -v wc").output == "new\n"
    host.ask("rmi", "--force", snapshot.image)


def test_a_sandbox_that_ends_itself_frees_its_slot_and_its_container(host):
    before = host.num_alive
    with Sandbox.open(PROFILE, host=host) as box:
        assert host.num_alive == before + 1
        assert box.run("kill -9 -1").killed_by == "agent"
        assert not box.alive
        with pytest.raises(SandboxGone):
            box.run("true")
        assert eventually(lambda: host.num_alive == before)
        assert box.handle.name not in containers(host)


def test_a_lifetime_ends(host):
    with Sandbox.open(dataclasses.replace(PROFILE, session_s=0.5), host=host) as box:
        assert eventually(lambda: not box.alive)
        with pytest.raises(SandboxGone, match="wall"):
            for _ in range(100):
                box.run("true")


def test_a_forgotten_sandbox_is_removed(host):
    before = host.num_alive
    box = Sandbox.open(PROFILE, host=host)
    name = box.handle.name
    del box
    gc.collect()
    assert host.num_alive == before
    assert eventually(lambda: name not in containers(host))


def test_containers_end_with_the_process_that_started_them(engine, host):
    script = f"""
        import dataclasses, time
        from rolljax.sandbox import TERMINAL, Sandbox, container_host
        box = Sandbox.open(dataclasses.replace(TERMINAL, image={IMAGE!r}), host=container_host({engine!r}))
        print(box.handle.name, flush=True)
        time.sleep(600)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    name = process.stdout.readline().strip()
    assert name in containers(host)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert eventually(lambda: name not in containers(host))


def test_what_cannot_be_made_is_said(engine, host):
    with pytest.raises(ConfigError, match=f"no image on this machine(.|\n)*{engine} pull"):
        Sandbox.open(dataclasses.replace(PROFILE, image="localhost/none:1"), host=host)
    with pytest.raises(ConfigError, match=r"Profile\.image is empty"):
        Sandbox.open(TERMINAL, host=host)
    with pytest.raises(DataError, match="build of localhost/none:1 failed"):
        host.provide("localhost/none:1", Path("/proc/none"), 60.0)


def test_a_program_inside_reaches_one_server(box):
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"hello")

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        code = (
            "import os, urllib.request; print(os.getcwd(), urllib.request.urlopen(os.environ['URL']).read().decode())"
        )
        result = run_served(
            box,
            [*interpreter().python, "-c", code],
            server.server_address,
            lambda url: {"URL": url},
            folder="/app",
            deadline_s=60.0,
        )
        server.shutdown()
    assert result.stdout == b"/app hello\n", result.stderr


def test_a_group_of_containers(host):
    with SandboxGroup(3, start_concurrency=3, profile=PROFILE, host=host) as group:
        ids = group.start()
        assert [group.run_in_session(i, "id -u", "main")["output"] for i in ids] == ["0\n"] * 3
        assert group.commit(ids[0], "localhost/rolljax-test:group") == {"image": "localhost/rolljax-test:group"}
    host.ask("rmi", "--force", "localhost/rolljax-test:group")


# tasks of Terminal-Bench in their images


TESTS = """
from pathlib import Path

def test_result():
    assert Path("/app/out").read_text() == "2 secret\\n"

def test_clean():
    assert not Path("/app/built").exists() and Path("/app/data.txt").exists()
"""


def write_task(folder):
    files = {
        "task.toml": "[environment]\nmemory_mb = 256\n",
        "instruction.md": "Count the lines.\n",
        "environment/Dockerfile": f"FROM {IMAGE}\nWORKDIR /app\nCOPY data.txt .\n"
        "RUN echo built > built && mkdir /opt && echo secret > /opt/version\n",
        "environment/data.txt": "a\nb\n",
        "tests/test_outputs.py": TESTS,
        "solution/solve.sh": '#!/bin/sh\necho "$(wc -l < data.txt) $(cat /opt/version)" > out\nrm built\n',
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def played(spec, *commands):
    """Return the first message and the result of an episode."""
    env = spec.make()
    try:
        first = env.reset(spec.task(0))[0].content
        for command in commands:
            env.step(env.reference_answer() if command == "REFERENCE" else command)
        return first, env.step("finish")
    finally:
        env.close()


@pytest.fixture
def task_folder(engine, host, tmp_path):
    folder = write_task(tmp_path / "count")
    yield folder
    for image in host.ask("images", "--format", "{{.Repository}}:{{.Tag}}").stdout.split():
        if image.startswith("localhost/rolljax/"):
            host.ask("rmi", "--force", image)


def test_a_task_runs_in_its_image(engine, task_folder, capsys):
    spec = HarborTasks(path=str(task_folder), images=engine)
    first, end = played(spec, "REFERENCE")
    assert "in /app" in first and end.success and end.metrics["tests_passed_n"] == 2
    assert end.metrics["tamper_n"] == end.metrics["not_taken_n"] == 0
    assert not played(spec)[1].success
    assert not played(spec, "rm data.txt built; printf '2 secret\\n' > out")[1].success  # deletions are carried over
    assert not played(spec, "rm -rf /* 2> /dev/null")[1].success
    env = spec.make()
    env.reset(spec.task(0))
    lost = env.step("kill -9 -1")
    assert not lost.success and lost.terminated and lost.metrics["sandbox_lost_n"] >= 1
    env.close()
    # a program that the policy has put in place of the system's does not reach the tests
    fake = "printf '#!/bin/sh\\necho 2 secret\\n' > /bin/cat; chmod 755 /bin/cat; echo wrong > out; rm built"
    assert not played(spec, fake)[1].success
    assert images.main([str(task_folder), engine]) == 0
    task = load_task(task_folder.absolute())
    assert f"count: {images.image_of(task)}" in capsys.readouterr().out


def test_a_changed_task_has_another_image_and_a_broken_one_is_an_error(engine, task_folder):
    before = images.image_of(load_task(task_folder.absolute()))
    (task_folder / "environment/data.txt").write_text("a\nb\nc\n")
    images._hash.cache_clear()
    after = images.image_of(load_task(task_folder.absolute()))
    assert before.partition(":")[0] == after.partition(":")[0] and before != after
    (task_folder / "environment/Dockerfile").write_text(f"FROM {IMAGE}\nRUN exit 7\n")
    images._hash.cache_clear()
    load_task.cache_clear()
    with pytest.raises(EnvError, match="task count: .*build of .* failed(.|\n)*7"):
        played(HarborTasks(path=str(task_folder), images=engine))


def test_a_task_may_name_its_image(engine, host, task_folder):
    shutil.rmtree(task_folder / "environment")
    (task_folder / "environment").mkdir()
    (task_folder / "task.toml").write_text(f'artifacts = ["/app"]\n[environment]\ndocker_image = "{IMAGE}"\n')
    load_task.cache_clear()
    with pytest.raises(DataError, match="no Dockerfile"):
        HarborTasks(path=str(task_folder)).tasks()
    spec = HarborTasks(path=str(task_folder), images=engine)
    _, end = played(spec, "cd /app; echo x > data.txt; printf '2 secret\\n' > out")
    assert end.success


def test_the_shared_host_is_one_per_engine(engine):
    assert container_host(engine) is container_host(engine)


@needs_sandbox
def test_bubblewrap_refuses_images():
    with SandboxHost() as host:
        with pytest.raises(ConfigError, match=r"Profile\.image(.|\n)*container_host"):
            Sandbox.open(PROFILE, host=host)
        with Sandbox.open(host=host) as box:
            for call in (box.changes, lambda: box.commit("x")):
                with pytest.raises(ConfigError, match="container_host"):
                    call()


def test_an_engine_that_is_not_there_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for engine in ("docker", "podman"):
        with pytest.raises(ConfigError, match="cannot be used: it is not installed"):
            ContainerHost(engine)
    (tmp_path / "docker").write_text("#!/bin/sh\necho 'is the daemon running?' >&2; exit 1\n")
    (tmp_path / "docker").chmod(0o755)
    assert "is the daemon running?" in engine_available("docker")
