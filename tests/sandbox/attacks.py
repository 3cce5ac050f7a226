"""The attack matrix: what hostile code tries, as programs. Each prints `through` if it got through.

A program reads its request, a dict `at`, from standard input. `CONTROL` marks those that get through for an ordinary
process of whoever runs the tests: without that, `stopped` would prove nothing. `CONTROL_AS_ROOT` get through for the root
of a namespace, as which nobody is harmed. The others need a kernel or a privilege that may not be there, or would harm
the machine.
"""

_HEAD = """
import ctypes, json, mmap, os, platform, signal, socket, subprocess, sys, time
at = json.loads(sys.stdin.readline())
libc = ctypes.CDLL(None, use_errno=True)
def checked(result):
    if result < 0: raise OSError(ctypes.get_errno(), "denied")
    return result
def syscall(x86_64, aarch64, *rest):
    return checked(libc.syscall(ctypes.c_long({"x86_64": x86_64, "aarch64": aarch64}[platform.machine()]), *rest))
def attack():
"""
_TAIL = """
try:
    attack()
except OSError:
    print("stopped")
else:
    print("through")
"""


def program(body: str) -> str:
    """The whole text of a program."""
    return _HEAD + "".join(f"    {line}\n" for line in body.strip().splitlines()) + _TAIL


CONTROL = {
    "read a secret": "open(at['secret']).read()",
    "read another episode": "os.listdir(at['other']); open(at['other'] + '/private').read()",
    "read the password file": "if 'root:' not in open(at['passwords']).read(): raise OSError",
    "read the environment of a process": """
found = []
for name in filter(str.isdigit, os.listdir('/proc')):
    try: found.append(at['cookie'] in open(f'/proc/{name}/environ').read())
    except OSError: pass
if not any(found): raise OSError
""",
    "read the memory of a process": "open(f\"/proc/{at['pid']}/mem\", 'rb').close()",
    "write outside": "open(at['outside'], 'w').write('x')",
    "connect by TCP": "socket.create_connection(('127.0.0.1', at['tcp']), timeout=2).close()",
    "send by UDP": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', at['udp']))",
    "connect to a Unix socket": "socket.socket(socket.AF_UNIX).connect(at['unix'])",
    "connect to an abstract socket": "socket.socket(socket.AF_UNIX).connect('\\0' + at['abstract'])",
    "open a netlink socket": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).close()",
    "signal a process of the host": "os.kill(at['pid'], 0)",
    "trace a process of the host": "checked(libc.ptrace(0x4206, at['pid'], 0, 0)); libc.ptrace(17, at['pid'], 0, 0)",
    "use System V shared memory": "libc.shmctl(syscall(29, 194, 0, 4096, 0o1600), 0, None)",
    "use a keyring": "syscall(250, 219, 0, -2, 1)",
    "make a memory file": "os.close(os.memfd_create('x'))",
    "use io_uring": "os.close(syscall(425, 425, 1, ctypes.create_string_buffer(256)))",
    "gain privileges by a program": "checked(-libc.prctl(39, 0, 0, 0, 0))",
    "make a thousand descriptors": "[os.dup(0) for _ in range(1000)]",
    "fork eighty processes": """
children = []
try:
    for _ in range(80):
        children.append(os.fork())
        if children[-1] == 0: time.sleep(10); os._exit(0)
finally:
    for child in children: os.kill(child, 9); os.wait()
""",
    "write a file of 40 MiB": "open('big', 'wb').truncate(40 << 20); os.unlink('big')",
    "make a sparse file of 1 TiB": "open('sparse', 'wb').truncate(1 << 40); os.unlink('sparse')",
}
"""Get through when nothing is in the way."""

CONTROL_AS_ROOT = {
    "enter a user namespace": "checked(libc.unshare(0x10000000))",
    "enter a mount namespace": "checked(libc.unshare(0x20000))",
    "clone into a user namespace": "syscall(56, 220, 0x10000011, 0, 0, 0, 0)",
    "mount": "checked(libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None))",
    "unmount": "checked(libc.umount2(b'/proc', 2))",
    "change root": "os.chroot('.')",
    "become root": "os.setuid(0)",
    "set limits higher": """
import resource
try: resource.setrlimit(resource.RLIMIT_NPROC, (9999, 9999))
except ValueError: raise OSError
""",
    "find a descriptor left open": """
for fd in range(4, 1024):
    try: os.fstat(fd)
    except OSError: continue
    break
else:
    raise OSError
""",
    "fill shared memory": """
try: open('/dev/shm/big', 'wb').write(b'x' * (16 << 20))
finally: os.unlink('/dev/shm/big')
""",
}
"""Get through for the root of a user namespace, with namespaces of its own for mounts and processes."""

OTHERS = {
    "make a file in /usr": "os.rmdir(os.mkdir('/usr/agentrt-test') or '/usr/agentrt-test')",
    "join a namespace": "checked(libc.setns(os.open('/proc/self/ns/uts', 0), 0))",
    "load a program into the kernel": "os.close(syscall(321, 280, 0, ctypes.create_string_buffer(128), 128))",
    "open performance counters": "os.close(syscall(298, 241, ctypes.create_string_buffer(128), 0, -1, -1, 0))",
    "handle page faults": "os.close(syscall(323, 282, 0))",
    "set the clock": "time.clock_settime(time.CLOCK_REALTIME, time.time())",
    "allocate 3 GiB": """
try: bytearray(3 << 30)
except MemoryError: raise OSError
""",
}
