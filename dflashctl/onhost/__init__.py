"""Programs that run on the host: standard library only, sent as text over standard input, never installed there.

`session.py` sends the modules of this package with every call and the host's own interpreter executes them; so what the command
line does on a host is plain Python that tests import, and no quoting stands between the two. They must parse on Python 3.8, so
that an interpreter that is too old for the trainer is told apart from a broken one.
"""
