"""`heteroinfer-worker calibrate`: what this machine really does, for plans made before any pod exists.

`command` needs nothing but the standard library and the contract; each measurement is a process of its own,
so that one that hangs or ends with SIGILL costs itself only, and threads start on the CPUs that they
shall have.
"""
