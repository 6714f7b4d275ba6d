"""Embeddings and scores: the requests of clients, the prompts for engines, and the answers."""
