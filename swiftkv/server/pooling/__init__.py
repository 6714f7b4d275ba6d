"""Embeddings and scores: what clients send, what engines are asked, and the answers."""
