"""What runs inside the sandbox: the zygote, the supervisor of a call, and the confinement of its payload.

Standard library only, and no import of agentrt: the zygote is started with `-I -S` and finds this package by its
folder, so nothing of the runtime (its modules, its secrets) is in a process that model-written code is forked from.
"""
