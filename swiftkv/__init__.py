"""swiftkv: several language models on one machine, sharing KV cache."""

__version__ = "0.1.0"
