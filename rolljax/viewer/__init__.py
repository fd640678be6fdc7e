"""The pages of `python -m rolljax.view`: a run folder read fast, served as JSON to a page that shows it."""
