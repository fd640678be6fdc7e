"""One folder per paper or application: its gin files, data, environments, stages, rewards and README.

A recipe imports the core; the core and other recipes import no recipe. The core finds recipes by looking into this
folder: gin files and data files by name (`--gin think_j`), classes by name (`@Critique()`), and environments by the
short names that a recipe's package lists as `ENVIRONMENTS` or `PREFIXES`, as `rolljax.envs.catalog` does its own.
"""
