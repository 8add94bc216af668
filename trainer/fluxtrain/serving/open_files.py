"""The limit of open files, which connections count towards."""

from __future__ import annotations

import resource


def raise_limit(wanted: int) -> int:
    """Let this process open ``wanted`` files, or as many as it may; return its limit.

    Containers often begin with 1024 and may have more. A server that has none left accepts nobody.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else soft
