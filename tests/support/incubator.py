"""A process that has imported torch and turns into Python commands by fork.

Importing torch takes seconds of a core, and hundreds of tests run a script, a module or a trainer as a process of its
own. A child forked here leaves the loop and runs its command at the top level of `__main__`, with the arguments, the
folder, the environment and the search path it would have had, so that everything from its first line to the end of its
interpreter is as in a command given by hand. What is imported beforehand is named on the command line: for tests that
are to see holdfast's own imports, torch and no more.

Whatever must be a fresh interpreter (variables that are read at its start or when torch is imported, limits and groups
that count what it has in memory) is started as one instead. See `tests.support.warm` for the other end.
"""

import gc
import importlib
import multiprocessing.process
import os
import pickle
import runpy
import select
import socket
import sys
import traceback

_, control, *names = sys.argv
INSTALLED = [
    path for path in sys.path[1:] if path not in os.environ.get("PYTHONPATH", "").split(os.pathsep)
]
"""Where a Python without PYTHONPATH looks for modules."""
for name in names:
    importlib.import_module(name)

# Or every child would look through all of torch's objects, and copy their pages, each time it collects garbage and
# once more when it ends: half a second each.
gc.collect()
gc.freeze()
if names:
    from huge_pages import move_to_huge_pages  # a neighbour of this file

    move_to_huge_pages()
    del sys.modules["huge_pages"]


def serve(control):
    """Returns in each child, with the arguments of the command that it is; the incubator itself ends here."""
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
            request, fds, _, _ = socket.recv_fds(control, 1 << 18, 3)
            if not request:
                os._exit(0)
            command, environment, folder, before = pickle.loads(request)
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
                os.environ.clear()
                os.environ.update(environment)
                os.chdir(folder)
                exec(before, {})
                return command
            out, err, back = fds
            os.close(out)
            os.close(err)
            report = socket.socket(fileno=back)
            report.send(pickle.dumps(pid))
            pidfd = os.pidfd_open(pid)
            children[pidfd] = pid, report
            poll.register(pidfd, select.POLLIN)


def become(command):
    """Sets arguments and search path as the interpreter does; the code to run, or the name of the module."""
    kind = command[0] if command[0] in ("-c", "-m") else None
    sys.argv = [kind, *command[2:]] if kind else list(command)
    if kind == "-c":
        first, code = "", compile(command[1], "<string>", "exec")
    elif kind == "-m":
        first, code = os.getcwd(), command[1]
    else:
        path = os.path.abspath(command[0])
        first = os.path.dirname(os.path.realpath(path))
        with open(path, "rb") as script:
            code = compile(script.read(), path, "exec")
    given = os.environ.get("PYTHONPATH", "")
    sys.path[:] = [first, *(given.split(os.pathsep) if given else ()), *INSTALLED]
    importlib.invalidate_caches()
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()
    return code


def play(code, space, system=sys, run=runpy._run_module_as_main, printed=traceback):
    """Runs it in `space`, the names of `__main__`, from which ours have gone."""
    kept = {
        "__name__": "__main__",
        "__builtins__": space["__builtins__"],
        "__spec__": None,
        "__doc__": None,
    }
    if not isinstance(code, str) and system.argv[0] != "-c":
        kept["__file__"] = code.co_filename
    space.clear()
    space.update(kept)
    try:
        if isinstance(code, str):
            run(code)
        else:
            exec(code, space)
    except Exception:
        # As the interpreter would print it, without the frame of the line above.
        kind, error, trace = system.exc_info()
        printed.print_exception(kind, error, trace.tb_next)
        system.exit(1)


if __name__ == "__main__":
    play(become(serve(socket.socket(fileno=int(control)))), globals())
