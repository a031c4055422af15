"""The front: HTTP in a process of its own on the leader's host, which starts the engine, watches
it, and outlives it.
"""
