"""How many files, which sockets are too, this process may open, and what it means when it may open no more.

A request takes two sockets, the client's and the replica's. Most systems allow 1,024 files where nobody asks for more,
and up to the hard limit to whoever does. At the limit no replica is at fault: one judged by it would be ejected,
and after it all others, though each is well.
"""

from __future__ import annotations

import errno
import logging
import resource
import time

MOST = 1_048_576  # some systems give a hard limit of thousands of millions, and what walks over all of them takes long
OURS = {
    errno.EMFILE: "this process may open no more files: raise its limit (LimitNOFILE=, ulimit -n)",
    errno.ENFILE: "this machine may open no more files: raise fs.file-max",
    errno.EADDRNOTAVAIL: "this machine has no local port left for a replica: widen net.ipv4.ip_local_port_range",
    errno.ENOBUFS: "the kernel has no memory left for sockets",
    errno.ENOMEM: "the kernel has no memory left for sockets",
}
SAID_EVERY_S = 10.0
log = logging.getLogger("forebay.sockets")
_said_at: dict[int, float] = {}


def ask_for_more() -> int:
    """Raises the limit as far as this process may; answers what it is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return soft


def ours(error: OSError) -> bool:
    """Whether a connection failed for what is short here; says so in the log, once in a while."""
    code = error.errno
    if code not in OURS:
        return False
    now = time.monotonic()
    if now - _said_at.get(code, -SAID_EVERY_S) >= SAID_EVERY_S:
        _said_at[code] = now
        log.error("no connection to a replica: %s", OURS[code])
    return True
