"""Says when the interpreter has run its exit hooks.

Imported before torch, its hook is the last to run: what comes after it is the interpreter taking its modules apart,
which with torch takes half a second on a good day and is no fault here.
"""

import atexit
import os
import time


def _say() -> None:
    os.write(1, b"leaving %d %f\n" % (os.getpid(), time.monotonic()))


atexit.register(_say)
