r"""Runs Python code from stdin in this process, without rights: the program that envs/python_tool.py starts.

    python -SPsB -X utf8 -c 'import sys, sandbox; sandbox.main(*sys.argv[1:])' \
        SECONDS BYTES PARENT_PID on|off READABLE_PATHS FOLDERS_OF_PACKAGES < code.py

Limits of the process come first. Then three mechanisms of Linux that need no privileges, and that a process cannot
take off again: no_new_privs; Landlock (files, TCP, signals; docs.kernel.org/userspace-api/landlock.html); a seccomp
filter, which refuses system calls by number. The code can read the interpreter's files and write plain files into the
working folder. It can start no process, no thread and no other program, and makes no connection. It runs on the same
kernel as everything else: faults of the kernel, and how long things take, are no secret from it.

What is imported here takes its time at each start: typing, json and ast would add 40 ms to 20.
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
REMOVE_FILE = 1 << 5
MAKE_FILE = 1 << 8
TRUNCATE = 1 << 14
NUM_RIGHTS = (0, 13, 14, 15, 15, 16)  # by ABI; the last for all later ones
READ = READ_FILE | READ_DIR
WRITE = READ | WRITE_FILE | REMOVE_FILE | MAKE_FILE | TRUNCATE
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE  # those that a rule for a single file may have
TCP = 0b11  # bind and connect, from ABI 4 on
SCOPES = 0b11  # abstract sockets, and signals to others, from ABI 6 on

MACHINES = ("x86_64", "aarch64")  # of which the following hold a number each
AUDIT_ARCH = (0xC000003E, 0xC00000B7)  # linux/audit.h
CAPSET = (126, 91)
FCNTL = (72, 25)
PRLIMIT = (302, 261)

# System calls that are refused: name, number on x86_64 (asm/unistd_64.h), on aarch64 (asm-generic/unistd.h; 0: none).
# They act on other processes, whose settings a user may change, or start some;
PROCESSES = """
clone 56 220, fork 57 0, vfork 58 0, clone3 435 435, execve 59 221, execveat 322 281, unshare 272 97
setns 308 268, kill 62 129, tkill 200 130, tgkill 234 131, rt_sigqueueinfo 129 138
rt_tgsigqueueinfo 297 240, pidfd_send_signal 424 424, pidfd_open 434 434, pidfd_getfd 438 438
ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, process_madvise 440 440
process_mrelease 448 448, kcmp 312 272, migrate_pages 256 238, move_pages 279 239
setpriority 141 140, ioprio_set 251 30, sched_setaffinity 203 122, sched_setscheduler 144 119
sched_setparam 142 118, sched_setattr 314 274
"""
# they make sockets, or what outlives a process;
SOCKETS = """
socket 41 198, socketpair 53 199, io_uring_setup 425 425, io_uring_enter 426 426
io_uring_register 427 427, shmget 29 194, msgget 68 186, semget 64 190, mq_open 240 180
mq_unlink 241 181, memfd_create 319 279, memfd_secret 447 447, add_key 248 217, request_key 249 218
keyctl 250 219
"""
# they change attributes of files, which Landlock leaves alone;
ATTRIBUTES = """
chmod 90 0, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 0, fchown 93 55, lchown 94 0
fchownat 260 54, utime 132 0, utimes 235 0, futimesat 261 0, utimensat 280 88, setxattr 188 5
lsetxattr 189 6, fsetxattr 190 7, setxattrat 463 463, removexattr 197 14, lremovexattr 198 15
fremovexattr 199 16, removexattrat 466 466, file_setattr 469 469, truncate 76 45
name_to_handle_at 303 264, open_by_handle_at 304 265
"""
# they are for root, or are often the way into the kernel.
SYSTEM = """
mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, open_tree 428 428
move_mount 429 429, fsopen 430 430, fsmount 432 432, mount_setattr 442 442, bpf 321 280
perf_event_open 298 241, userfaultfd 323 282, fanotify_init 300 262, init_module 175 105
finit_module 313 273, kexec_load 246 104, kexec_file_load 320 294, reboot 169 142, swapon 167 224
swapoff 168 225, acct 163 89, syslog 103 116, quotactl 179 60, settimeofday 164 170
clock_settime 227 112, adjtimex 159 171, clock_adjtime 305 266, sethostname 170 161
setdomainname 171 162, iopl 172 0, ioperm 173 0, modify_ldt 154 0
"""
LINES = ",".join((PROCESSES, SOCKETS, ATTRIBUTES, SYSTEM)).replace("\n", ",").split(",")
ENTRIES = [line.split() for line in LINES if line]
REFUSED = {name: (int(x86_64), int(aarch64)) for name, x86_64, aarch64 in ENTRIES}
X32 = 0x40000000  # from this number on, calls of x86_64's other ABI

# Opcodes and results of linux/bpf_common.h and linux/seccomp.h.
LOAD = 0x20
IF_EQUAL = 0x15
IF_AT_LEAST = 0x35
RETURN = 0x06
ALLOW = 0x7FFF0000
KILL = 0x80000000
REFUSE = 0x00050000 + errno.EPERM

# Bytes of struct seccomp_data.
NUMBER = 0
ARCH = 4
FIRST_ARGUMENT = 16
SECOND_ARGUMENT = 24

# Commands of fcntl that choose the process which gets a file's signals, and the signal.
SET_OWNER = 8
SET_SIGNAL = 10
SET_OWNER_EX = 15

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
    """Returns which protection this machine lacks, in a few words; empty where it has all."""
    machine = os.uname().machine
    if sys.platform != "linux":
        return "Linux"
    if machine not in MACHINES:
        return f"table of system calls for {machine}"
    if landlock_abi() < 1:
        return "Landlock (Linux 5.13 or later, and lsm=landlock where the kernel leaves it out)"
    libc.prctl(PR_SET_SECCOMP, 2, None, 0, 0)  # mode 2 without a filter: EFAULT where filters are known
    if ctypes.get_errno() != errno.EFAULT:
        return "seccomp with filters"
    return ""


def landlock_abi() -> int:
    """Returns the version of Landlock, 0 or less where there is none."""
    return libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1)


def checked(result: int) -> int:
    """Returns the result of a system call. Raises: OSError where it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def confine(readable: list[str]) -> None:
    """Takes all rights but those of this file's docstring. Raises: OSError where the kernel refuses a step."""
    column = MACHINES.index(os.uname().machine)
    checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    drop_capabilities(column)
    restrict_files(readable)
    program = make_filter(column)
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HP", len(program) // 8, ctypes.addressof(buffer))
    checked(libc.prctl(PR_SET_SECCOMP, 2, header, 0, 0))


def drop_capabilities(column: int) -> None:
    """Gives up what root may do beyond others."""
    version = 0x20080522  # linux/capability.h: three sets of 64 bits
    header = struct.pack("Ii", version, 0)
    checked(libc.syscall(CAPSET[column], header, bytes(24)))


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
    for numbers in REFUSED.values():
        if numbers[column]:
            program += [instruction(IF_EQUAL, numbers[column], if_false=1), instruction(RETURN, REFUSE)]
    program += [
        instruction(IF_EQUAL, PRLIMIT[column], if_false=4),
        instruction(LOAD, FIRST_ARGUMENT),
        instruction(IF_EQUAL, 0, if_false=1),  # of this process itself
        instruction(RETURN, ALLOW),
        instruction(RETURN, REFUSE),
        instruction(IF_EQUAL, FCNTL[column], if_false=5),
        instruction(LOAD, SECOND_ARGUMENT),
        instruction(IF_EQUAL, SET_OWNER, if_true=2),
        instruction(IF_EQUAL, SET_SIGNAL, if_true=1),
        instruction(IF_EQUAL, SET_OWNER_EX, if_false=1),
        instruction(RETURN, REFUSE),
        instruction(RETURN, ALLOW),
    ]
    return b"".join(program)


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
    sys.path[-1:] = packages.split(os.pathsep)  # in place of the folder of this file
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
