"""Forked children that say what they found."""

from __future__ import annotations

import os
import pickle
import signal
import warnings


def forked(action):
    """Start an action in a forked child; the result waits for what the action returns.

    A child that hangs is killed.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: other threads are on
        pid = os.fork()
    if not pid:
        signal.alarm(60)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                os.write(writing, pickle.dumps(action()))
        except BaseException as error:
            os.write(writing, pickle.dumps(repr(error)))
        finally:
            os._exit(0)
    os.close(writing)

    def answer():
        with os.fdopen(reading, "rb") as pipe:
            said = pipe.read()
        os.waitpid(pid, 0)
        assert said, "the child hung, and was killed"
        return pickle.loads(said)

    return answer


def child(action):
    """What the action returns in a forked child."""
    return forked(action)()


def told_by(action):
    """The warnings of an action."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(one.message) for one in caught]
