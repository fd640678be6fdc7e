"""Dockerfiles: supported instructions, and refusals of others."""

from rolljax.recipes.terminal_bench.dockerfile import File, Put, RunCommand, read_dockerfile

CONTEXT = {"a.txt": File(b"a", 0o644), "bin/run.sh": File(b"run", 0o755), "bin/lib/x.py": File(b"x", 0o644)}


def puts(text, context=CONTEXT):
    return {s.path: s.data for s in read_dockerfile(text, context).steps if isinstance(s, Put)}


def commands(text):
    return [s.command for s in read_dockerfile(text, CONTEXT).steps if isinstance(s, RunCommand)]


def test_folders_variables_and_commands_in_order():
    recipe = read_dockerfile(
        'FROM ubuntu:24.04\nARG NAME=app\nWORKDIR /srv\nWORKDIR $NAME\nENV A=1 B="two words"\nENV C old form\n'
        'RUN echo $A > a \\\n  # a comment\n  && chmod 600 a\nUSER nobody\nCMD ["bash"]\n',
        {},
    )
    assert recipe.workdir == "/srv/app" and recipe.env == {"A": "1", "B": "two words", "C": "old form"}
    assert recipe.unsupported == ()
    assert [s.command for s in recipe.steps][:2] == ["mkdir -p /srv", "mkdir -p /srv/app"]
    last = recipe.steps[-1]
    assert last.command.split() == "echo $A > a && chmod 600 a".split()
    assert (last.workdir, last.env) == ("/srv/app", {"NAME": "app", **recipe.env})


def test_copies():
    head = "FROM x\nWORKDIR /w\n"
    assert puts(head + "COPY a.txt ./") == {"/w/a.txt": b"a"}
    assert puts(head + "COPY a.txt b.txt") == {"/w/b.txt": b"a"}
    assert puts(head + "ADD a.txt /etc/conf/") == {"/etc/conf/a.txt": b"a"}
    assert puts(head + "COPY bin .") == {"/w/run.sh": b"run", "/w/lib/x.py": b"x"}
    assert puts(head + "COPY bin/ /opt/tools") == {"/opt/tools/run.sh": b"run", "/opt/tools/lib/x.py": b"x"}
    assert puts(head + 'COPY ["a.txt", "/x y/"]') == {"/x y/a.txt": b"a"}
    assert puts(head + "COPY *.txt bin/*.sh /d/") == {"/d/a.txt": b"a", "/d/run.sh": b"run"}
    assert sorted(puts(head + "COPY . .")) == ["/w/a.txt", "/w/bin/lib/x.py", "/w/bin/run.sh"]
    assert puts(head + "COPY <<EOF note\nline 1\nline 2\nEOF\n") == {"/w/note": b"line 1\nline 2\n"}


def test_modes_come_from_the_file_or_the_flag():
    steps = read_dockerfile("FROM x\nCOPY bin/run.sh /r\nCOPY --chmod=600 --chown=a:b a.txt /a\n", CONTEXT).steps
    assert [(s.path, s.mode) for s in steps] == [("/r", 0o755), ("/a", 0o600)]


def test_heredocs_and_exec_form():
    assert commands("FROM x\nRUN <<EOF\nset -e\ntouch a\nEOF\n") == ["set -e\ntouch a\n"]
    assert commands("FROM x\nRUN cat > f <<'END'\n$kept\nEND\n") == ["cat > f <<'END'\n$kept\nEND\n"]
    assert commands('FROM x\nRUN ["echo", "a b"]\n') == ["echo 'a b'"]


def test_installs_of_what_is_there_are_passed_over():
    text = "FROM x\nRUN apt-get update && apt-get install -y python3 tmux && rm -rf /var/lib/apt/lists/* && mkdir /d\n"
    assert commands(text) == ["mkdir /d"]
    assert commands("FROM x\nRUN pip install --no-cache-dir pytest==8.4.1\n") == []
    assert read_dockerfile(text, {}).unsupported == ()


def test_what_cannot_be_done_is_listed():
    recipe = read_dockerfile(
        "FROM a AS one\nFROM b\nCOPY --from=one /x /y\nCOPY missing.txt .\nADD https://example.org/x.tar /x\n"
        "RUN apt-get install -y r-base nginx=1.2\nRUN curl -O https://example.org/x\nVOLUME /data\nONBUILD RUN x\n",
        CONTEXT,
    )
    text = "\n".join(recipe.unsupported)
    for part in (
        "several stages",
        "--from=one",
        "missing.txt",
        "https://example.org/x.tar",
        "curl",
        "VOLUME",
        "ONBUILD",
    ):
        assert part in text, part
    assert len(recipe.unsupported) == 7 and recipe.packages == ("r-base", "nginx")
