"""Which levels this machine must have, as others say: a test of one that it has is never skipped."""

import shutil
import subprocess

from agentrt.sandbox.inside import landlock, seccomp
from agentrt.sandbox.level import Level


def is_supported(level: Level) -> bool:
    """What others say of this machine: util-linux of namespaces, the kernel of Landlock."""
    if level is Level.L2:
        return landlock.abi() >= landlock.SCOPES_ABI and seccomp.is_known()
    unshare = shutil.which("unshare")
    argv = [str(unshare), "--user", "--map-root-user", "--mount", "--pid", "--fork", "true"]
    return unshare is not None and subprocess.run(argv, capture_output=True, timeout=20).returncode == 0
