"""Agents that bring their own loop: programs that talk to the policy over OpenAI's API, and are trained by it."""
