"""The gateway: OpenAI-style HTTP on one side, engine processes on the other."""
