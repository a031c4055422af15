"""Decides what each tick does: who gets a slot, which prompt pages run, how many decode steps.

Rule: pure and deterministic. No JAX, no HTTP, no threads, no clock: the same calls give the same
plans. Entry point: `scheduler.scheduler.Scheduler`. Try it: `python -m pytest tests/scheduler`.
"""
