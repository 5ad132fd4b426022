"""The tool python: what it returns, and what hostile code cannot do."""

import json
import os
import platform
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import pytest
from test_scoring import wait_until_gone

from envs import make_env, sandbox
from envs.base import INLINE, Env, Reply, Step
from envs.python_tool import CodeError, Interpreter
from utils.rewards.helper import EpisodeCache, Turns
from utils.rewards.scorer import Scorer
from utils.settings.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = ROOT / "tests" / "fixtures" / "data"
MISSING = sandbox.missing_protection()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"there is no {MISSING}")
needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="machine code of x86_64")


def run(code: str, seconds: float = 20.0, memory: int = 512, is_confined: bool = True) -> str:
    """Returns the result of code, "!" and the reason where it fails."""
    interpreter = Interpreter(seconds, memory << 20, is_confined)
    interpreter.renew()
    try:
        return interpreter.python(code)
    except CodeError as error:
        return f"!{error}"


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("1 + 1", "2"),
        ("x = 6\nprint(x)\nx * 7", "6\n42"),
        ("'a'", "'a'"),
        ("None", ""),
        ("", ""),
        ("x = 1", ""),
        ("def f(n):\n    return n * f(n - 1) if n else 1\nf(20)", "2432902008176640000"),
        ("import math, fractions, itertools\nmath.comb(10, 3)", "120"),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    b: int\nA(1)", "A(b=1)"),
        ("if __name__ == '__main__':\n    print('é')", "é"),
        ("hash('a') == hash('a')", "True"),
        ("open('a', 'w').write('b')\nprint(open('a').read())", "b"),
        ("import sys\nsys.exit()", ""),
        ("1 / 0", "!ZeroDivisionError: division by zero"),
        ("print('before')\nraise ValueError('a\\nb')", "!ValueError: a b"),
        ("raise KeyError", "!KeyError"),
        ("1 +", "!SyntaxError: invalid syntax (code, line 1)"),
        ("import sys\nsys.exit('no')", "!no"),
        ("import os\nos._exit(3)", "!the process ended with exit code 3"),
        ("input()", "!EOFError: EOF when reading a line"),
        ("\0", "!SyntaxError: source code string cannot contain null bytes"),
        ("'\ud800'", "'?'"),
        ("import sys\nsys.stdout.buffer.write(b'\\xff\\x1b[2J') and None", "\ufffd\x1b[2J"),
        ("import ctypes\nctypes.string_at(0)", "!the process was ended by signal 11 (Segmentation fault)"),
    ],
)
def test_results_and_errors(code, result):
    assert run(code) == result


def test_hashes_are_the_same_in_every_process():
    code = "list({'a', 'b', 'c', 'd', 'e'})"
    assert run(code) == run(code)


def test_packages_of_this_environment_are_there():
    assert run("import numpy as np\nint(np.linalg.inv(np.eye(3) * 0.5).sum())") == "6"


@pytest.mark.parametrize(
    "code", ["while True: pass", "import time\ntime.sleep(99)", "import os\nos.close(1)\nos.close(2)\nwhile 1: 0"]
)
def test_endless_code_is_ended(code):
    start = time.monotonic()
    assert run(code, seconds=0.5) == "!the code of this turn took longer than 0.5 seconds"
    assert time.monotonic() - start < 5


def test_calls_of_a_turn_share_their_time():
    interpreter = Interpreter(0.7, 1 << 29, True)
    for _ in range(2):
        interpreter.renew()
        with pytest.raises(CodeError, match="longer than 0.7 seconds"):
            for _ in range(3):
                interpreter.python("import time\ntime.sleep(0.4)")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("x = []\nwhile True: x.append(bytearray(10**6))", "MemoryError"),
        ("'x' * 10**10", "MemoryError"),
        ("while True: print('x' * 10**6)", "the code printed more than 1 MiB"),
        ("import sys\nwhile True: sys.stderr.write('x')", "the code printed more than 1 MiB"),
        (
            "for i in range(10**6): open(str(i), 'w').write('x' * 10**6)",
            "the code wrote more than 1000 files or 16 MiB",
        ),
        ("for i in range(10**6): open(str(i), 'w')", "the code wrote more than 1000 files or 16 MiB"),
        ("open('a', 'wb').truncate(10**9)", "OSError: [Errno 27] File too large"),
        ("files = [open('a', 'w') for i in range(999)]", "OSError: [Errno 24] Too many open files: 'a'"),
        ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded"),
        ("(" * 10**5, "SyntaxError: too many nested parentheses (code, line 1)"),
        ("import resource as r\nr.setrlimit(r.RLIMIT_AS, (-1, -1))", "ValueError: not allowed to raise maximum limit"),
    ],
)
def test_limits_of_memory_output_and_files(code, reason):
    start = time.monotonic()
    assert run(code) == "!" + reason
    assert time.monotonic() - start < 15


REFUSED = "PermissionError: [Errno 1] Operation not permitted"
DENIED = "PermissionError: [Errno 13] Permission denied"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("os.fork()", REFUSED),
        ("while True: os.fork()", REFUSED),
        ("os.posix_spawn('/bin/ls', ['ls'], {})", f"{REFUSED}: '/bin/ls'"),
        ("os.execv('/bin/ls', ['ls'])", REFUSED),
        ("subprocess.run(['ls'])", REFUSED),
        ("threading.Thread(target=print).start()", "RuntimeError: can't start new thread"),
        ("os.kill(os.getppid(), 9)", REFUSED),
        ("os.killpg(os.getpgid(os.getppid()), 9)", REFUSED),
        ("signal.pidfd_send_signal(0, 9)", REFUSED),
        ("os.pidfd_open(os.getppid())", REFUSED),
        ("os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)", REFUSED),
        ("os.sched_setaffinity(os.getppid(), [0])", REFUSED),
        ("resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (0, 0))", REFUSED),
        ("fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())", REFUSED),
        ("fcntl.fcntl(os.pipe()[0], fcntl.F_SETSIG, 9)", REFUSED),
        ("socket.socket()", REFUSED),
        ("socket.socket(socket.AF_UNIX)", REFUSED),
        ("socket.socketpair()", REFUSED),
        ("os.memfd_create('a')", REFUSED),
        ("os.listdir('/')", f"{DENIED}: '/'"),
        ("os.listdir('/proc')", f"{DENIED}: '/proc'"),
        ("os.listdir('..')", f"{DENIED}: '..'"),
        ("open('/etc/passwd')", f"{DENIED}: '/etc/passwd'"),
        ("open('/proc/self/environ')", f"{DENIED}: '/proc/self/environ'"),
        ("open('/dev/tty')", f"{DENIED}: '/dev/tty'"),
        ("os.mkdir('a')", f"{DENIED}: 'a'"),
        ("os.mkfifo('a')", f"{DENIED}"),
        ("os.symlink('/etc/passwd', 'a')", f"{DENIED}: '/etc/passwd' -> 'a'"),
        ("os.setuid(12345)", REFUSED),
        ("os.chroot('.')", f"{REFUSED}: '.'"),
    ],
)
def test_what_code_must_not_do_is_refused(code, reason):
    modules = "import fcntl, os, resource, signal, socket, subprocess, threading\n"
    assert run(modules + code) == "!" + reason


ATTRIBUTES = {
    "open({!r}).read()": 13,
    "open({!r}, 'a')": 13,
    "os.truncate({!r}, 0)": 1,
    "os.remove({!r})": 13,
    "os.rename({!r}, 'a')": 18,
    "os.link({!r}, 'a')": 18,
    "os.chmod({!r}, 0)": 1,
    "os.chown({!r}, 1, 1)": 1,
    "os.utime({!r}, (0, 0))": 1,
    "os.setxattr({!r}, 'user.a', b'')": 1,
}


@pytest.mark.parametrize("code", ATTRIBUTES)
@pytest.mark.parametrize("place", ["home", "project", "temporary folder"])
def test_files_elsewhere_are_neither_read_nor_changed(place, code, tmp_path):
    folder = {"home": Path.home(), "project": ROOT, "temporary folder": tmp_path}[place]
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".lmpo-test-") as file:
        file.write(b"secret")
        file.flush()
        before = os.stat(file.name)
        result = run("import os\n" + code.format(file.name))
        assert re.match(rf"!(PermissionError|OSError): \[Errno ({ATTRIBUTES[code]}|13)\]", result)
        after = os.stat(file.name)
        assert Path(file.name).read_bytes() == b"secret"
        assert (after.st_mode, after.st_uid, after.st_mtime) == (before.st_mode, before.st_uid, before.st_mtime)


def test_a_server_of_this_machine_is_not_reached():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        port = server.getsockname()[1]
        assert run(f"import urllib.request as u\nu.urlopen('http://127.0.0.1:{port}')").endswith(f"{REFUSED[17:]}>")
        with pytest.raises(BlockingIOError):
            server.accept()


CALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
result = libc.syscall({number}, *{arguments})
print(result, ctypes.get_errno())
"""


@pytest.mark.parametrize("name", sandbox.REFUSED)
def test_system_calls_are_refused_by_number(name):
    """With arguments that do no harm should one be allowed; other errors than EPERM would show that it was tried."""
    number = sandbox.REFUSED[name][sandbox.MACHINES.index(platform.machine())]
    if not number:
        pytest.skip("this architecture does not have it")
    assert run(CALL.format(number=number, arguments=(-1, -1, -1, -1, -1))) == "-1 1"


INT_0x80 = """
import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20 (getpid); int 0x80; ret
address = ctypes.addressof(ctypes.c_char.from_buffer(code))
ctypes.CFUNCTYPE(ctypes.c_int)(address)()
"""


@needs_x86
@pytest.mark.parametrize("code", [INT_0x80, CALL.format(number=0x40000000 + 39, arguments=())], ids=["i386", "x32"])
def test_calls_of_other_architectures_end_the_process(code):
    assert run(code) == "!the process was ended by signal 31 (Bad system call)"


def pids_with(text: str) -> list[int]:
    """Returns the processes in whose command line a text stands."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if text.encode() in (folder / "cmdline").read_bytes():
                pids.append(int(folder.name))
        except OSError:
            pass
    return pids


FORK_BOMB = """
import os, time
for _ in range(3):
    try:
        os.fork()
    except OSError:
        pass
time.sleep(99)
"""


def test_no_process_is_left_of_a_fork_bomb():
    memory = random.Random(str(os.getpid())).randrange(2**29, 2**30)  # is in the command line: finds the processes
    interpreter = Interpreter(1.0, memory, True)
    interpreter.renew()
    with pytest.raises(CodeError, match="longer than 1 seconds"):
        interpreter.python(FORK_BOMB)
    wait_until_gone(*pids_with(str(memory)))


def test_without_confinement_the_group_is_killed():
    memory = random.Random(str(-os.getpid())).randrange(2**29, 2**30)
    interpreter = Interpreter(1.0, memory, False)
    interpreter.renew()
    assert run("open('/etc/passwd').readable()", is_confined=False) == "True"
    with pytest.raises(CodeError, match="longer than 1 seconds"):
        interpreter.python(FORK_BOMB)
    wait_until_gone(*pids_with(str(memory)))


def test_the_process_ends_with_the_one_that_called_it(tmp_path):
    memory = random.Random(str(os.getppid())).randrange(2**29, 2**30)
    code = f"from envs.python_tool import *; Interpreter(50.0, {memory}, True, 50.0).python('while True: pass')"
    variables = {**os.environ, "TMPDIR": str(tmp_path)}  # the caller cannot remove its folder
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=variables) as process:
        deadline = time.monotonic() + 20
        while len(pids := pids_with(f"\0{memory}\0")) < 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert pids
    wait_until_gone(*pids)


def test_nothing_is_left_in_the_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "import os\nopen('a', 'w').write('b')\nos.mkdir('d')\nos.chdir('d')\nopen('e', 'w')"
    assert run(code, is_confined=False).startswith("<_io.TextIOWrapper name='e'")
    assert run("open('a', 'w').write('b')") == "1"
    run("open('a', 'w')\nwhile True: pass", seconds=0.3)
    assert not list(tmp_path.iterdir())


# the environment


@cache
def gsm8k(**options: str) -> Env:
    return make_env("python", data_dir=str(SAMPLES), **options)


def call(code: str) -> str:
    return json.dumps({"name": "python", "arguments": {"code": code}})


def replies_of(env: Env, code: str) -> tuple[Reply, Reply]:
    payload = code if env.dialect == "python" else call(code)
    return Reply("Let me compute.", (payload,)), Reply(f"It is \\boxed{{{env.problem(0).answer}}}.")


@pytest.mark.parametrize("dialect", ["qwen", "python"])
def test_questions_are_asked_and_graded_by_their_environment(dialect):
    env = gsm8k(dialect=dialect, call_cost=0.1)
    question = make_env("gsm8k", data_dir=str(SAMPLES), form="boxed").problem(0)
    problem = env.problem(0)
    assert problem.messages[-1]["content"].startswith(question.messages[-1]["content"])
    assert (problem.answer, problem.prefix) == (question.answer, "")
    assert ("<|python_start|>" in problem.messages[-1]["content"]) == (not problem.tools) == (dialect == "python")
    first, last = replies_of(env, "print(2)\n40 + 2")
    episode = env.episode(problem, 0)
    role = INLINE if dialect == "python" else "tool"
    info = {"tool_calls": 1, "tool_errors": 0}
    assert episode.act(first) == Step([{"role": role, "content": "2\n42"}], -0.1, info=info)
    assert episode.act(last).info == {"tool_calls": 0, "tool_errors": 0, "correct_answer": 1.0, "format": 1.0}
    wrong = env.episode(problem, 0).act(Reply("It is \\boxed{-7.5}."))
    assert (wrong.reward, wrong.info["correct_answer"], wrong.done) == (0.0, 0.0, True)


def test_an_episode_is_played_again_from_its_replies():
    env = gsm8k()
    replies = replies_of(env, "{'a', 'b', 'c'}")
    episode = env.episode(env.problem(0), 0)
    steps = [episode.act(reply) for reply in replies]
    turns = [Turns(0, replies[:n]) for n in (1, 2)]
    assert [EpisodeCache().play(env, env.problem, 0, turn) for turn in turns] == steps


def test_code_runs_in_processes_that_score():
    options = {"data_dir": str(SAMPLES), "seconds": 3.0}
    bomb = "x = []\nwhile True: x.append(bytearray(10**6))"
    codes = ["1 + 1", "while True: pass", bomb, "import os\nos.kill(os.getppid(), 9)"]
    with Scorer("python", options, num_workers=1, timeout=30) as scorer:
        turns = [Turns(0, (Reply("", (call(code), call("2 + 2"))),)) for code in codes]
        steps = scorer.request_outcomes([(0, turn) for turn in turns])
    results = [[message["content"] for message in step.messages] for step in steps]
    late = str({"error": "the code of this turn took longer than 3 seconds"})
    assert results[0] == ["2", "4"] and results[1] == [late, late]
    assert results[2][0] in (str({"error": "MemoryError"}), late) and results[3][0] == str({"error": REFUSED})


def test_machines_that_cannot_confine_are_refused(monkeypatch):
    monkeypatch.setattr(sandbox, "missing_protection", lambda: "Landlock")
    with pytest.raises(UserError, match="cannot confine code here: there is no Landlock; --env_options sandbox=off"):
        make_env("python", data_dir=str(SAMPLES))
    env = make_env("python", data_dir=str(SAMPLES), sandbox="off")
    assert env.episode(env.problem(0), 0).act(Reply("", (call("1"),))).messages[0]["content"] == "1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"problems": "countdown"}, "choose one of gsm8k"),
        ({"sandbox": "maybe"}, "sandbox=on or off"),
        ({"memory": 1}, "memory >= 64"),
        ({"dialect": "lisp"}, "dialects qwen, python"),
    ],
    ids=str,
)
def test_mistakes_are_named(options, message):
    with pytest.raises(UserError, match=message):
        make_env("python", data_dir=str(SAMPLES), **options)
