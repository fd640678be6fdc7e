"""Models as judges: requests, prompts, and the parsing, counting and storage of verdicts."""
