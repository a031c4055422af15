"""Trains K3-nano, the miniature of Kimi K3 that ships with k3serve.

One rule: everything the model ever reads is generated here, from our own word lists and templates,
so the weights carry no third-party text and a run is reproducible from its seed.

Try it: `python -m scripts.train_nano --help`, and docs/nano-model.md.
"""
