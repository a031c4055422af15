"""Text in and out: tokenizer, chat rendering, channel parser, stop strings.

Rule: text never becomes a special token unless this package's own code put it there. Standard
library and tiktoken only; no JAX, no HTTP.
"""
