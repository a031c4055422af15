"""Reading checkpoints: names and shapes (names), files (hf), MXFP4 (mxfp4), weights on devices
(sources, load).
"""
