"""Runs attnorm commands in child processes that share one import of the libraries, and kills them when asked to.

Importing torch and transformers takes seconds, which would be most of a trial. This process imports them once, does no
computation, and forks a child for each command that it reads from stdin:

    {"argv": ["analyze", ...], "kill_after": 0.7, "kill_at": null}
    {"rc": -9, "seconds": 0.7}                                         its answer, one line

kill_after: seconds until SIGKILL, or null. kill_at: a pattern of paths, SIGKILL as soon as one exists, or null.
"""

import glob
import json
import os
import signal
import sys
import time


def main() -> None:
    # What the commands import, before the first fork.
    import attnorm_lab.experiments.run
    import attnorm_lab.training.clrs.train
    import attnorm_lab.training.lm
    import attnorm_lab.training.retrieval.train  # noqa: F401

    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(_run(asked["argv"], asked["kill_after"], asked["kill_at"])), file=answers, flush=True)


def _run(argv: list[str], kill_after: float | None, kill_at: str | None) -> dict[str, float]:
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _command(argv)
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        seconds = time.monotonic() - began
        if done:
            return {"rc": os.waitstatus_to_exitcode(status), "seconds": seconds}
        exists = kill_at is not None and glob.glob(kill_at)  # noqa: PTH207 - an absolute path with a pattern
        if exists or (kill_after is not None and seconds >= kill_after):
            os.kill(child, signal.SIGKILL)
            kill_after = kill_at = None
        time.sleep(0.002)


def _command(argv: list[str]) -> None:
    """The child: runs the command as `python -m attnorm` does, and never returns."""
    from attnorm.cli import app

    code = 70
    try:
        log = os.open(os.environ["ATTNORM_COMMAND_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.argv = ["attnorm", *argv]
        app(argv)
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
