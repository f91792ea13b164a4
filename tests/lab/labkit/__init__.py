"""The parts of the test lab: a hypervisor node in its own namespaces, its containers, sshd and the link to it.

It is a package below tests/lab so that its modules can import each other; conftest.py puts tests/lab on sys.path.
Tests use the fixtures of conftest.py and import nothing from here but types.
"""
