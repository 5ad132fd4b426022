"""The tool python: what it returns, and what hostile code cannot do."""

import json
import os
import platform
import random
import re
import struct
import tempfile
import time
from pathlib import Path

import pytest

from envs import make_env
from envs.base import INLINE, Reply, Step
from envs.scoring.scorer import Scorer, ScoringStream
from envs.scoring.worker import Turns
from recipes.python_tool import sandbox
from recipes.python_tool.interpreter import CodeError, Interpreter
from tests.processes import wait_until_gone
from utils.settings.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
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
        ("def f(n):\n    return n * f(n - 1) if n else 1\nf(20)", "2432902008176640000"),
        ("if __name__ == '__main__':\n    print('é')", "é"),
        ("1 / 0", "!ZeroDivisionError: division by zero"),
        ("print('before')\nraise ValueError('a\\nb')", "!ValueError: a b"),
        ("1 +", "!SyntaxError: invalid syntax (code, line 1)"),
        ("import sys\nsys.exit('no')", "!no"),
        ("input()", "!EOFError: EOF when reading a line"),
        ("'\ud800'", "'?'"),
        ("import sys\nsys.stdout.buffer.write(b'\\xff\\x1b[2J') and None", "\ufffd\x1b[2J"),
        ("import ctypes\nctypes.string_at(0)", "!the process was ended by signal 11 (Segmentation fault)"),
        ("import random, secrets, uuid\nlen({random.random(), secrets.token_hex(), uuid.uuid4()})", "3"),
        ("import threading\nthreading.Event().wait(0.01), threading.Lock().acquire(timeout=0.01)", "(False, True)"),
        ("import signal as s\ns.signal(14, lambda *_: print(1))\nx = s.setitimer(0, 0.01)\ns.pause()", "1"),
        ("import re, decimal, datetime, sqlite3, asyncio, multiprocessing, ctypes.util, zipfile, xml.dom.minidom", ""),
        ("import numpy as np\nnp.save('a', np.ones(3))\nnp.load('a.npy', mmap_mode='r').sum()", "np.float64(3.0)"),
    ],
)
def test_results_and_errors(code, result):
    assert run(code) == result


def test_hashes_are_the_same_in_every_process():
    code = "list({'a', 'b', 'c', 'd', 'e'})"
    assert run(code) == run(code)


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
        ("while True: print('x' * 10**6)", "the code printed more than 1 MiB"),
        ("for i in range(10**6): open(str(i), 'w')", "the code wrote more than 1000 files or 16 MiB"),
        ("open('a', 'wb').truncate(10**9)", "OSError: [Errno 27] File too large"),
        ("files = [open('a', 'w') for i in range(999)]", "OSError: [Errno 24] Too many open files: 'a'"),
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
        ("subprocess.run(['ls'])", REFUSED),
        ("threading.Thread(target=print).start()", "RuntimeError: can't start new thread"),
        ("os.kill(os.getppid(), 9)", REFUSED),
        ("fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())", REFUSED),
        ("socket.socket()", REFUSED),
        ("os.listdir('/')", f"{DENIED}: '/'"),
        ("os.listdir('..')", f"{DENIED}: '..'"),
        ("open('/etc/passwd')", f"{DENIED}: '/etc/passwd'"),
        ("open('/proc/self/environ')", f"{DENIED}: '/proc/self/environ'"),
        ("open('/proc/self/mem', 'r+b')", f"{DENIED}: '/proc/self/mem'"),
        ("open('/dev/shm/lmpo-test', 'w')", f"{DENIED}: '/dev/shm/lmpo-test'"),
        ("os.mkfifo('a')", REFUSED),
        ("open('/dev/tty')", f"{DENIED}: '/dev/tty'"),
        ("open('a', 'w') and os.remove('a')", f"{REFUSED}: 'a'"),
        ("open('a', 'w') and os.rename('a', 'b')", f"{REFUSED}: 'a' -> 'b'"),
        ("os.open('.', os.O_TMPFILE | os.O_RDWR)", f"{REFUSED}: '.'"),
        ("os.symlink('/etc/passwd', 'a')", f"{REFUSED}: '/etc/passwd' -> 'a'"),
    ],
)
def test_what_code_must_not_do_is_refused(code, reason):
    modules = "import fcntl, os, socket, subprocess, threading\n"
    assert run(modules + code) == "!" + reason


CHANGES = (
    "open({!r}).read()", "open({!r}, 'a')", "os.truncate({!r}, 0)", "os.remove({!r})", "os.rename({!r}, 'a')",
    "os.link({!r}, 'a')", "os.chmod({!r}, 0)", "os.chown({!r}, 1, 1)", "os.utime({!r}, (0, 0))",
    "os.setxattr({!r}, 'user.a', b'')",
)  # fmt: skip


@pytest.mark.parametrize("code", CHANGES)
def test_files_elsewhere_are_neither_read_nor_changed(code, tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"secret")
    before = file.stat()
    assert re.match(r"!(PermissionError|OSError): \[Errno (1|13)\]", run("import os\n" + code.format(str(file))))
    after = file.stat()
    assert file.read_bytes() == b"secret"
    assert (after.st_mode, after.st_uid, after.st_mtime) == (before.st_mode, before.st_uid, before.st_mtime)


def verdict(program: bytes, number: int, arguments: tuple[int, ...] = (), arch: int = 0) -> int:
    """Returns what a program of Berkeley's packet filter says to a system call."""
    words = [word & 2**64 - 1 for word in (*arguments, *6 * (0,))]
    data = struct.pack("<IIQ6Q", number, arch, 0, *words[:6])
    place = value = 0
    while True:
        code, if_true, if_false, operand = struct.unpack_from("<HBBI", program, 8 * place)
        place += 1
        if code == 0x06:
            return operand
        if code == 0x20:
            (value,) = struct.unpack_from("<I", data, operand)
        else:
            is_true = {
                0x15: value == operand,
                0x35: value >= operand,
                0x45: value & operand,
            }[code]
            place += if_true if is_true else if_false


ARGUMENTS = [
    ("futex", {(0, op) for op in (128, 129, 137, 138, 393)}, {(0, op) for op in (0, 1, 3, 4, 5, 6, 131, 134, 141)}),
    ("fcntl", {(0, op) for op in (*range(5), 1030)}, {(0, op) for op in (*range(5, 40), 1024, 1026, 1031)}),
    ("prlimit64", {(0, 7)}, {(1, 7), (2**31, 7), (-1, 7)}),
    ("clock_gettime", {(0,), (1,), (2,), (3,), (11,)}, {(-1,), (-6,), (~os.getpid() << 3 | 2,)}),
    ("clock_nanosleep", {(0,), (1,)}, {(~os.getpid() << 3 | 2,)}),
    ("openat", {(0, 0, os.O_CREAT | os.O_RDWR)}, {(0, 0, os.O_TMPFILE), (-100, 0, os.O_TMPFILE | os.O_RDWR)}),
]


@pytest.mark.parametrize("column", [0, 1], ids=sandbox.MACHINES)
def test_the_filter_has_a_decision_for_every_call(column):
    """By an interpreter of such programs; with arguments of 0, then with others."""
    program = sandbox.make_filter(column)
    arch = sandbox.AUDIT_ARCH[column]
    refused = 0x00050001
    allowed = 0x7FFF0000
    killed = 0x80000000
    verdicts = {number: verdict(program, number, arch=arch) for number in (*range(2048), 2**30 - 1)}
    numbers = {numbers[column] for numbers in sandbox.ALLOWED.values()} - {-1, sandbox.ALLOWED["futex"][column]}
    assert verdicts == {number: allowed if number in numbers else refused for number in verdicts}
    assert verdict(program, 39, arch=sandbox.AUDIT_ARCH[1 - column]) == killed
    assert verdict(program, 0x40000027, arch=arch) == (killed, refused)[column]
    for name, good, bad in ARGUMENTS:
        number = sandbox.ALLOWED[name][column]
        assert {verdict(program, number, arguments, arch) for arguments in good} == {allowed}
        assert {verdict(program, number, arguments, arch) for arguments in bad} == {refused}


HEADERS = ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm-generic/unistd.h")


@pytest.mark.parametrize("column", [0, 1], ids=sandbox.MACHINES)
def test_numbers_are_those_of_the_kernel(column):
    if not Path(HEADERS[column]).exists():
        pytest.skip("no headers of the kernel here")
    numbers = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(HEADERS[column]).read_text()))
    numbers.setdefault("newfstatat", numbers.get("fstatat"))
    table = {name: pair[column] for name, pair in sandbox.ALLOWED.items()}
    assert table == {name: int(numbers.get(name, -1)) for name in table}
    assert len(set(table.values()) - {-1}) == len([number for number in table.values() if number >= 0])
    assert f"{len(table)} system calls" in (ROOT / "recipes/python_tool/README.md").read_text()


CALL = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    return libc.syscall(*arguments), ctypes.get_errno()
"""
INT_0x80 = """
import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20 (getpid); int 0x80; ret
address = ctypes.addressof(ctypes.c_char.from_buffer(code))
ctypes.CFUNCTYPE(ctypes.c_int)(address)()
"""


@needs_x86
@pytest.mark.parametrize("code", [INT_0x80, CALL + "call(0x40000000 + 39)"], ids=["i386", "x32"])
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


@pytest.mark.parametrize("is_confined", [True, False])
def test_no_process_is_left_of_a_fork_bomb(is_confined):
    memory = random.Random(f"{os.getpid()} {is_confined}").randrange(2**29, 2**30)  # finds the command lines
    interpreter = Interpreter(1.0, memory, is_confined)
    interpreter.renew()
    with pytest.raises(CodeError, match="longer than 1 seconds"):
        interpreter.python(FORK_BOMB)
    wait_until_gone(*pids_with(str(memory)))


def test_without_confinement_files_are_read():
    assert run("open('/etc/passwd').readable()", is_confined=False) == "True"


def test_the_process_ends_with_the_one_that_scores(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # the worker cannot remove its folder
    memory = random.Random(str(-os.getppid())).randrange(2**9, 2**20)
    options = {"data_dir": str(SAMPLES), "seconds": 50.0, "memory": memory}
    code = "import ctypes, time\nctypes.CDLL(None).prctl(1, 0)\ntime.sleep(99)"  # PR_SET_PDEATHSIG
    with Scorer("python", options, num_workers=1, timeout=60) as scorer, ScoringStream(scorer) as stream:
        stream.add({0: (0, Turns(0, (Reply("", (call(code),)),)))})
        deadline = time.monotonic() + 20
        while not (pids := pids_with(f"\0{memory << 20}\0")) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)  # it is at its code
        scorer.lanes[0].process.kill()
        assert pids
        wait_until_gone(*pids)


def test_nothing_is_left_in_the_temporary_folder(tmp_path, monkeypatch):
    # Temporary folders of the sandbox are counted here.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "import os\nopen('a', 'w').write('b')\nos.mkdir('d')\nos.chdir('d')\nopen('e', 'w')"
    assert run(code, is_confined=False).startswith("<_io.TextIOWrapper name='e'")
    assert run("open('a', 'w').write('b')") == "1"
    run("open('a', 'w')\nwhile True: pass", seconds=0.3)
    assert not list(tmp_path.iterdir())


# the environment


def call(code: str) -> str:
    return json.dumps({"name": "python", "arguments": {"code": code}})


@pytest.mark.parametrize("dialect", ["qwen", "python"])
def test_questions_are_asked_and_graded_by_their_environment(dialect):
    env = make_env("python", data_dir=str(SAMPLES), dialect=dialect, call_cost=0.1)
    question = make_env("gsm8k", data_dir=str(SAMPLES), form="boxed").problem(0)
    problem = env.problem(0)
    assert problem.messages[-1]["content"].startswith(question.messages[-1]["content"])
    assert (problem.answer, problem.prefix) == (question.answer, "")
    assert ("<|python_start|>" in problem.messages[-1]["content"]) == (not problem.tools) == (dialect == "python")
    code = "print(2)\n40 + 2"
    first = Reply("Let me compute.", (code if dialect == "python" else call(code),))
    last = Reply(f"It is \\boxed{{{problem.answer}}}.")
    episode = env.episode(problem, 0)
    role = INLINE if dialect == "python" else "tool"
    info = {"tool_calls": 1, "tool_errors": 0}
    assert episode.act(first) == Step([{"role": role, "content": "2\n42"}], -0.1, info=info)
    assert episode.act(last).info == {"tool_calls": 0, "tool_errors": 0, "correct_answer": 1.0, "format": 1.0}
    wrong = env.episode(problem, 0).act(Reply("It is \\boxed{-7.5}."))
    assert (wrong.reward, wrong.info["correct_answer"], wrong.done) == (0.0, 0.0, True)


def test_code_runs_in_processes_that_score():
    options = {"data_dir": str(SAMPLES), "seconds": 3.0}
    bomb = "x = []\nwhile True: x.append(bytearray(10**6))"
    codes = ["1 + 1", "while True: pass", bomb, "import os\nos.kill(os.getppid(), 9)"]
    with Scorer("python", options, num_workers=1, timeout=30) as scorer:
        turns = [Turns(0, (Reply("", (call(code), call("2 + 2"))),)) for code in codes]
        steps = scorer.request_outcomes([(0, turn) for turn in turns])
    results = [[message["content"] for message in step.messages] for step in steps]
    late = str({"error": "the code of this turn took longer than 3 seconds"})
    assert results[0] == ["2", "4"]
    assert results[1] == [late, late]
    assert results[2][0] in (str({"error": "MemoryError"}), late)
    assert results[3][0] == str({"error": REFUSED})


def test_machines_that_cannot_confine_are_refused(monkeypatch):
    # A kernel without Landlock.
    monkeypatch.setattr(sandbox, "missing_protection", lambda: "Landlock")
    with pytest.raises(UserError, match="since there is no Landlock: give --env_options sandbox=off"):
        make_env("python", data_dir=str(SAMPLES))
    env = make_env("python", data_dir=str(SAMPLES), sandbox="off")
    assert env.episode(env.problem(0), 0).act(Reply("", (call("1"),))).messages[0]["content"] == "1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"problems": "countdown"}, "choose one of gsm8k"),
        ({"sandbox": "maybe"}, "sandbox=maybe: choose one of on, off"),
        ({"memory": 1}, "memory >= 64"),
        ({"seconds": 0.0}, "0 < seconds <= 3600"),
        ({"dialect": "lisp"}, "dialect=lisp: choose one of qwen, python, json"),
    ],
    ids=str,
)
def test_mistakes_are_named(options, message):
    with pytest.raises(UserError, match=message):
        make_env("python", data_dir=str(SAMPLES), **options)
