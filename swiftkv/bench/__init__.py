"""A load generator for servers that speak OpenAI's HTTP, and its report."""
