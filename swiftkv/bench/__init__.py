"""Load for a server that speaks OpenAI's HTTP, and what came of it."""
