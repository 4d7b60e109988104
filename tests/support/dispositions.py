"""Signals that the process which started the tests has set to be ignored.

`nohup` ignores SIGHUP, and a shell without job control ignores SIGINT and SIGQUIT in what it starts in the background.
That is inherited by everything the tests start, and a trainer that is to die of Ctrl-C lives on. A handler is not
inherited by another program: it finds the default there.
"""

from __future__ import annotations

import signal


def take_back() -> None:
    """Programs started from here on find the defaults. SIGHUP does not end this process all the same: that is what
    `nohup` is for."""
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, _pass)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as Python has it


def _pass(number: int, frame: object) -> None:
    pass
