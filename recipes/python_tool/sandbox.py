r"""Runs Python code from stdin in this process, without rights: the program that interpreter.py starts.

    python -SPsB -X utf8 -c 'import sys, sandbox; sandbox.main(*sys.argv[1:])' \
        SECONDS BYTES PARENT_PID on|off READABLE_PATHS FOLDERS_OF_PACKAGES < code.py

Limits of the process come first. Then follow three mechanisms of Linux that need no privileges, and that a process
cannot take off again. They are no_new_privs, Landlock (files, TCP, signals;
docs.kernel.org/userspace-api/landlock.html) and a seccomp filter, which allows the system calls of a table and refuses
all others. The code can read the interpreter's files, and write plain files into the working folder, where they stay.
It can start no process, no thread and no other program, and makes no connection. It runs on the kernel of the machine,
so it can use faults of the kernel and measure times.

Imports cost time at each start: typing, json and ast would add 40 ms to 20.
"""

import _ast  # the part of ast in C
import ctypes
import errno
import os
import resource
import struct
import sys

MAX_FILE = 1 << 20  # bytes of a file, also of what is printed
MAX_OPEN_FILES = 64
SIGKILL = 9

# linux/prctl.h
PR_SET_PDEATHSIG = 1
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38

# Calls of Landlock, which have the same numbers on all architectures.
CREATE_RULESET = 444
ADD_RULE = 445
RESTRICT_SELF = 446

# Rights of linux/landlock.h: the first 13 are those of ABI 1.
EXECUTE = 1 << 0
WRITE_FILE = 1 << 1
READ_FILE = 1 << 2
READ_DIR = 1 << 3
MAKE_FILE = 1 << 8
TRUNCATE = 1 << 14
NUM_RIGHTS = (0, 13, 14, 15, 15, 16)  # by ABI; the last for all later ones
READ = READ_FILE | READ_DIR
WRITE = READ | WRITE_FILE | MAKE_FILE | TRUNCATE
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE  # those that a rule for a single file may have
TCP = 0b11  # bind and connect, from ABI 4 on
SCOPES = 0b11  # abstract sockets, and signals to others, from ABI 6 on

MACHINES = ("x86_64", "aarch64")  # the tables below hold a number for each
AUDIT_ARCH = (0xC000003E, 0xC00000B7)  # linux/audit.h
CAPSET = (126, 91)

# System calls that are allowed: name, number on x86_64 (asm/unistd_64.h), on aarch64 (asm-generic/unistd.h; -1: none).
# All others are refused, those of kernels to come among them. These read and write files, which Landlock limits; none
# removes or renames one, so that each file keeps a name by which interpreter.py counts it;
FILES = """
openat 257 56, close 3 57, close_range 436 436, read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67
pwrite64 18 68, preadv 295 69, pwritev 296 70, lseek 8 62, ftruncate 77 46, fsync 74 82, fdatasync 75 83
stat 4 -1, fstat 5 80, lstat 6 -1, newfstatat 262 79, statx 332 291, access 21 -1, faccessat 269 48
faccessat2 439 439, getdents64 217 61, getcwd 79 17, chdir 80 49, fchdir 81 50, dup 32 23, dup2 33 -1, dup3 292 24
fcntl 72 25, poll 7 -1, ppoll 271 73, select 23 -1, pselect6 270 72
"""
# these act on memory, signal handlers and timers of this process;
PROCESS = """
brk 12 214, mmap 9 222, munmap 11 215, mprotect 10 226, mremap 25 216, madvise 28 233, msync 26 227, futex 202 98
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, sigaltstack 131 132, restart_syscall 219 128
pause 34 -1, alarm 37 -1, getitimer 36 102, setitimer 38 103, nanosleep 35 101, clock_nanosleep 230 115
sched_yield 24 124, prlimit64 302 261, exit 60 93, exit_group 231 94
"""
# and these return the time, random numbers, and facts about the process and the machine.
FACTS = """
clock_gettime 228 113, clock_getres 229 114, gettimeofday 96 169, time 201 -1, times 100 153, getrandom 318 278
getrusage 98 165, getpid 39 172, getppid 110 173, gettid 186 178, getuid 102 174, geteuid 107 175, getgid 104 176
getegid 108 177, sched_getaffinity 204 123, getcpu 309 168, uname 63 160, sysinfo 99 179
"""
LINES = ",".join((FILES, PROCESS, FACTS)).replace("\n", ",").split(",")
ENTRIES = [line.split() for line in LINES if line]
ALLOWED = {name: (int(x86_64), int(aarch64)) for name, x86_64, aarch64 in ENTRIES}
# Some of them for a few values of an argument only: its number, and the values.
CHECKED = {
    "fcntl": (1, (0, 1, 2, 3, 4, 1030)),  # F_DUPFD, flags, F_DUPFD_CLOEXEC: no locks, leases, owners, sizes of pipes
    "futex": (1, (128, 129, 137, 138, 393)),  # WAIT and WAKE, without and with a time limit, within this process
    "prlimit64": (0, (0,)),  # of this process
    "clock_gettime": (0, range(12)),  # clocks of other processes have negative numbers
    "clock_nanosleep": (0, range(12)),
}
O_TMPFILE = 0x400000  # of openat: a file without a name
X32 = 0x40000000  # from this number on, calls of x86_64's other ABI

# Opcodes and results of linux/bpf_common.h and linux/seccomp.h.
LOAD = 0x20
IF_EQUAL = 0x15
IF_AT_LEAST = 0x35
IF_ANY_BIT = 0x45
RETURN = 0x06
ALLOW = 0x7FFF0000
KILL = 0x80000000
REFUSE = 0x00050000 + errno.EPERM

# Bytes of struct seccomp_data.
NUMBER = 0
ARCH = 4
ARGUMENTS = 16

libc = ctypes.CDLL(None, use_errno=True)


def set_limits(seconds: int, memory: int) -> None:
    """Limits CPU time, memory (bytes), files and processes; the last does not bind root."""
    limits = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: MAX_FILE,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_AS: memory,
    }
    for kind, value in limits.items():
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(kind, (value, value))
        except (ValueError, OSError):  # macOS has no limit of memory
            pass


def missing_protection() -> str:
    """Returns which protection this machine lacks, in a few words; empty if it has all."""
    machine = os.uname().machine
    if sys.platform != "linux":
        return "Linux"
    if machine not in MACHINES:
        return f"table of system calls for {machine}"
    if landlock_abi() < 1:
        return "Landlock (Linux 5.13 or later, and lsm=landlock if the kernel leaves it out)"
    libc.prctl(PR_SET_SECCOMP, 2, None, 0, 0)  # mode 2 without a filter: EFAULT if the kernel has filters
    if ctypes.get_errno() != errno.EFAULT:
        return "seccomp with filters"
    return ""


def landlock_abi() -> int:
    """Returns the version of Landlock; 0 or less if there is none."""
    return libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1)


def checked(result: int) -> int:
    """Returns the result of a system call. Raises: OSError if it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def confine(readable: list[str]) -> None:
    """Gives up all rights except those in this file's docstring. Raises: OSError if the kernel refuses a step."""
    column = MACHINES.index(os.uname().machine)
    checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    version = 0x20080522  # linux/capability.h: three sets of 64 bits, the rights that only root has
    checked(libc.syscall(CAPSET[column], struct.pack("Ii", version, 0), bytes(24)))
    restrict_files(readable)
    program = make_filter(column)
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HP", len(program) // 8, ctypes.addressof(buffer))
    checked(libc.prctl(PR_SET_SECCOMP, 2, header, 0, 0))


def restrict_files(readable: list[str]) -> None:
    """Restricts files by Landlock to reading `readable` and writing into the working folder."""
    abi = checked(landlock_abi())
    handled = (1 << NUM_RIGHTS[min(abi, len(NUM_RIGHTS) - 1)]) - 1
    network = TCP if abi >= 4 else 0
    scopes = SCOPES if abi >= 6 else 0
    attributes = struct.pack("QQQ", handled, network, scopes)
    ruleset = checked(libc.syscall(CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0))
    for path in filter(os.path.exists, readable):
        add_rule(ruleset, path, READ & handled)
    add_rule(ruleset, ".", WRITE & handled)
    checked(libc.syscall(RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def add_rule(ruleset: int, path: str, rights: int) -> None:
    """Allows rights on a file, or on a folder and all in it."""
    file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    if not os.path.isdir(path):
        rights &= FILE_RIGHTS
    rule = struct.pack("=Qi", rights, file)
    checked(libc.syscall(ADD_RULE, ruleset, 1, rule, 0))
    os.close(file)


def make_filter(column: int) -> bytes:
    """Returns the program of the seccomp filter: instructions of 8 bytes, with jumps relative to the next one."""
    program = [
        instruction(LOAD, ARCH),
        instruction(IF_EQUAL, AUDIT_ARCH[column], if_true=1),
        instruction(RETURN, KILL),  # a call of another architecture, whose numbers mean other calls
        instruction(LOAD, NUMBER),
    ]
    if MACHINES[column] == "x86_64":
        program += [instruction(IF_AT_LEAST, X32, if_false=1), instruction(RETURN, KILL)]
    for name, numbers in ALLOWED.items():
        if numbers[column] >= 0:
            verdict = check_argument(name)
            program += [instruction(IF_EQUAL, numbers[column], if_false=len(verdict)), *verdict]
    program.append(instruction(RETURN, REFUSE))
    return b"".join(program)


def check_argument(name: str) -> list[bytes]:
    """Returns the instructions that allow a call, or allow it only for some values of an argument."""
    allow, refuse = instruction(RETURN, ALLOW), instruction(RETURN, REFUSE)
    if name == "openat":
        return [instruction(LOAD, ARGUMENTS + 2 * 8), instruction(IF_ANY_BIT, O_TMPFILE, if_false=1), refuse, allow]
    if name not in CHECKED:
        return [allow]
    number, values = CHECKED[name]
    tests = [instruction(IF_EQUAL, value, if_true=len(values) - i) for i, value in enumerate(values)]
    return [instruction(LOAD, ARGUMENTS + number * 8), *tests, refuse, allow]


def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Returns a struct sock_filter of linux/filter.h; jumps are numbers of instructions to skip."""
    return struct.pack("HBBI", code, if_true, if_false, value)


def run(code: str) -> None:
    """Runs code as a notebook does: a last statement that is an expression prints its value. Raises what it raises."""
    names = {"__name__": "__main__"}
    tree = compile(code, "code", "exec", _ast.PyCF_ONLY_AST)
    is_expression = bool(tree.body) and isinstance(tree.body[-1], _ast.Expr)
    last = [tree.body.pop()] if is_expression else []
    exec(compile(tree, "code", "exec"), names)
    exec(compile(_ast.Interactive(last), "code", "single"), names)


def main(seconds: str, memory: str, parent: str, confinement: str, readable: str, packages: str) -> None:
    """Runs the code from stdin under these settings, the arguments of the command."""
    set_limits(int(seconds), int(memory))
    if sys.platform == "linux":
        libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # it ended before the call above
        sys.exit(1)
    code = sys.stdin.read()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # replaces the file with the code
    os.close(null)
    sys.path[-1:] = packages.split(os.pathsep)  # replaces the folder of this file
    if confinement == "on":
        confine(readable.split(os.pathsep))
    try:
        run(code)
        sys.stdout.flush()
    except Exception as error:  # of the code
        sys.stdout.flush()
        message = " ".join(f"{type(error).__name__}: {error}".split())
        print(message.removesuffix(":"), file=sys.stderr, flush=True)
        os._exit(1)  # nothing is printed behind it
    os._exit(0)
