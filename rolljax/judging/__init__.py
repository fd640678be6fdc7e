"""Models as judges: how they are asked, how their verdicts are parsed, counted and kept."""
