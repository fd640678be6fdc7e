"""Data pipelines: records in, stages, records out; `python -m rolljax.data RECIPE.gin --in A --out B`."""
