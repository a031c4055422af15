"""The same tick on every host: the plan codec, the leader's engine loop, the followers' loop.

Rule: no JAX and no HTTP; the device is a `device.TickDevice`. Followers import neither scheduler,
api nor text, so nothing is re-exported here: import `lockstep.leader.Leader` or
`lockstep.follower.follow`. Try it: `python -m pytest tests/lockstep`.
"""
