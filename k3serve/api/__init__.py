"""HTTP on process 0: an OpenAI-compatible server over anything that implements types.Executor.

Rule: no JAX and no knowledge of the engine; `server.serve` is the only entry point that app needs.
"""
