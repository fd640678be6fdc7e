"""The pages of `python -m rolljax.view`: reads a run folder fast and serves it as JSON to a page."""
