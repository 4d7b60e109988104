"""A process that has imported torch and holdfast, and turns into trainers by fork.

Importing torch takes seconds and there are many trainers to run. A child forked here leaves the loop and runs its
script at the top level of `__main__`, so that everything from its first line to the end of its interpreter is as in a
script started by hand. Whatever must be a fresh interpreter (start methods other than fork, interpreter flags) is
started as one instead: see `tests.lifecycle.trainer`.
"""

# isort: off
import tests.lifecycle.leaving  # before torch

# isort: on
import gc
import os
import pickle
import select
import socket
import sys
import traceback

import holdfast
import tests.lifecycle.samples

PRELOADED = (holdfast, tests.lifecycle.samples, tests.lifecycle.leaving)

# Or every trainer would look through all of torch's objects, and copy their pages, each time it collects garbage and
# once more when it ends: half a second each.
gc.collect()
gc.freeze()


def serve(control):
    """Returns in each child, with what it has to run; the incubator itself ends here."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    children = {}
    while True:
        for fd, _ in poll.poll():
            if fd in children:
                pid, report = children.pop(fd)
                poll.unregister(fd)
                os.close(fd)
                report.send(pickle.dumps(os.waitpid(pid, 0)[1]))
                report.close()
                continue
            request, fds, _, _ = socket.recv_fds(control, 65536, 3)
            if not request:
                os._exit(0)
            path, environment = pickle.loads(request)
            pid = os.fork()
            if pid == 0:
                control.close()
                for pidfd, (_, report) in children.items():
                    os.close(pidfd)
                    report.close()
                os.setsid()
                for target, fd in enumerate(fds[:2], start=1):
                    os.dup2(fd, target)
                for fd in fds:
                    os.close(fd)
                os.environ.update(environment)
                return path
            out, err, back = fds
            os.close(out)
            os.close(err)
            report = socket.socket(fileno=back)
            report.send(pickle.dumps(pid))
            pidfd = os.pidfd_open(pid)
            children[pidfd] = pid, report
            poll.register(pidfd, select.POLLIN)


if __name__ == "__main__":
    sys.argv = [serve(socket.socket(fileno=int(sys.argv[1])))]
    __file__ = sys.argv[0]
    with open(__file__) as script:
        code = compile(script.read(), __file__, "exec")
    del serve, script
    try:
        exec(code)
    except Exception:
        # As the interpreter would print it, without the frame of the line above.
        kind, error, trace = sys.exc_info()
        traceback.print_exception(kind, error, trace.tb_next)
        sys.exit(1)
